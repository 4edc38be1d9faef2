"""Predictions give the published figures that the profiles cite, and the page about profiles prints the same data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import shapes
from configs import LLAMA_2_7B, MISTRAL_7B, QWEN_3_8B, QWEN_3_30B_A3B, SMOLLM2_135M

from edgekit import plugins
from edgekit.contracts.device import DeviceProfile, PublishedSpeed
from edgekit.contracts.plan import Speed
from edgekit.contracts.recipe import GGUF_RECIPES, named_recipe
from edgekit.device.catalogue import all_profiles
from edgekit.planner.speed import predict
from edgekit.quant.gguf_mixtures import mixture_of

PROFILES = {name: profile for name, profile in all_profiles().items() if profile.measured}
MODELS = {
    "Gemma-3-1B": shapes.GEMMA_3_1B,
    "Llama-3.1-8B": shapes.LLAMA_31_8B,
    "Llama-3.2-1B": shapes.LLAMA_32_1B,
    "Llama-3.2-3B": shapes.LLAMA_32_3B,
    "Mistral-7B": MISTRAL_7B,
    "Qwen2.5-7B": shapes.QWEN_25_7B,
    "Qwen3-30B-A3B": QWEN_3_30B_A3B,
    "Qwen3-4B": QWEN_3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "SmolLM2-135M": SMOLLM2_135M,
    "TinyLlama-1.1B": LLAMA_2_7B
    | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
    "llama-2-70b": shapes.LLAMA_2_70B,
    "llama-2-7b": LLAMA_2_7B,
}


def predicted(profile: DeviceProfile, row: PublishedSpeed) -> Speed:
    model = shapes.spec_of(MODELS[row.model], row.model)
    target, backend = row.engine.split(".")
    mixture = GGUF_RECIPES.get(row.recipe)
    recipe = named_recipe(row.recipe) if mixture is None else mixture_of(model, mixture)
    offer = plugins.load_target(target).offer(model, profile, backend, recipe)
    if target == "executorch" and row.recipe == "float16":  # others' programs keep 16 bits, where ours have 32
        offer = offer.model_copy(update={"memory": offer.memory.model_copy(update={"float_bits": 16})})
    return predict(model, offer, profile, read_tokens=row.context, prompt_tokens=512, kv_bits=16)


def ratios(profile: DeviceProfile) -> Iterator[tuple[str, str, float]]:
    """Yield the engine, the phase with its model, and predicted over published speed."""
    for row in profile.measured:
        speed, what = predicted(profile, row), f"{row.model} {row.recipe}"
        if row.decode_tokens_per_s is not None:
            yield row.engine, f"decode {what}", speed.decode_tokens_per_s / row.decode_tokens_per_s
        if row.prefill_tokens_per_s is not None:
            assert speed.prefill_tokens_per_s is not None, f"{what}: the compute is not known"
            yield row.engine, f"prefill {what}", speed.prefill_tokens_per_s / row.prefill_tokens_per_s


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_gives_every_figure_that_it_cites(name: str) -> None:
    for engine, what, ratio in ratios(PROFILES[name]):
        assert 0.9 <= ratio <= 1.1, f"{engine} {what}: predicted {ratio:.2f} of the published speed"


def test_published_figures_lie_in_the_range_that_is_shown() -> None:
    for profile in PROFILES.values():
        for row in profile.measured:
            speed = predicted(profile, row)
            assert speed.origin == "published for this chip and engine"
            low, expected, high = speed.decode
            assert low <= 0.9 * expected and high >= 1.1 * expected
            assert row.decode_tokens_per_s is None or low <= row.decode_tokens_per_s <= high


def test_the_page_about_profiles_prints_these_errors() -> None:
    by_engine: dict[str, dict[str, list[float]]] = {}
    devices: dict[str, set[str]] = {}
    for profile in PROFILES.values():
        for engine, what, ratio in ratios(profile):
            by_engine.setdefault(engine, {}).setdefault(what.split()[0], []).append(abs(ratio - 1))
            devices.setdefault(engine, set()).add(profile.chip)
    lines = ["| engine | chips | decode: figures, median and worst error | prefill |", "|---|---|---|---|"]
    for engine, phases in sorted(by_engine.items()):
        shown = [
            f"{len(errors)}, {median(errors):.0%}, {max(errors):.0%}" if errors else ""
            for errors in (phases.get("decode", []), phases.get("prefill", []))
        ]
        lines.append(f"| {engine} | {len(devices[engine])} | {' | '.join(shown)} |")
    page = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text()
    assert "\n".join(lines) in page, "\n" + "\n".join(lines)


def test_a_range_says_where_it_comes_from() -> None:
    model = shapes.spec_of(shapes.LLAMA_32_1B, "Llama-3.2-1B")
    found = {}
    for device in ("pixel-9", "iphone-16-pro", "macbook-m4-16gb"):
        profile = all_profiles()[device]
        offer = next(iter(plugins.load_target("llamacpp").offers(model, profile)))
        speed = predict(model, offer, profile, read_tokens=64, prompt_tokens=512, kv_bits=16)
        found[device] = speed.origin
        assert speed.decode.low < speed.decode.expected == speed.decode_tokens_per_s < speed.decode.high
        assert any("never run by us" in note for note in offer.notes)
    assert found == {
        "pixel-9": "a share of another chip's bandwidth",
        "iphone-16-pro": "from memory",
        "macbook-m4-16gb": "published for this chip and engine",
    }


def test_a_plan_of_an_older_version_has_one_figure() -> None:
    speed = Speed(prefill_tokens_per_s=None, decode_tokens_per_s=34.0, first_token_s=None, basis="a plan of version 2")
    assert speed.decode == (34.0, 34.0, 34.0) and speed.decode.show() == "34"
    assert "decode_range" not in speed.model_dump_json()
    assert speed.model_copy(update={"decode_range": (28.4, 34.0, 41.2)}).decode.show(" to ") == "28 to 41"
