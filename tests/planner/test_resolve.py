"""The resolver: invariants for every model, device and request, and the ladder and fixes on known cases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import shapes
from configs import GEMMA_3N_E2B, LLAMA_2_7B, MISTRAL_7B, QWEN_3_8B, QWEN_3_30B_A3B, SMOLLM2_135M
from hypothesis import given, settings, strategies as st

import edgekit
from edgekit import plugins
from edgekit.common.parsing import validate
from edgekit.common.units import GIB, MIB, show_bytes
from edgekit.contracts.device import DeviceProfile, PublishedSpeed
from edgekit.contracts.memory import LONE_VERIFIED_ROWS
from edgekit.contracts.plan import Plan, Speed
from edgekit.contracts.recipe import (
    GGUF_RECIPES,
    NATIVE_RECIPES,
    RECIPES,
    Format,
    Recipe,
    Rule,
    budget_bytes,
    named_recipe,
)
from edgekit.contracts.stored_weights import stored_weight_bytes
from edgekit.contracts.token_costs import touched_weight_bytes
from edgekit.device.catalogue import all_profiles
from edgekit.device.load import load_profile
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported
from edgekit.planner.candidates import PlanSubject
from edgekit.planner.make import make_plans, targets_for
from edgekit.planner.request import PlanRequest
from edgekit.planner.resolver import resolve
from edgekit.planner.speed import predict
from edgekit.quant.gguf_mixtures import mixture_of

TARGETS = targets_for(None)


PROFILES = all_profiles()


MODELS = {
    name: PlanSubject(shapes.spec_of(getattr(shapes, name), name), name, "0" * 64)
    for name in ("LLAMA_32_1B", "LLAMA_31_8B", "GEMMA_3_1B", "QWEN_25_7B", "LLAMA_2_70B")
}


def plan_for(model: str, device: DeviceProfile | str, **request: Any) -> Plan:
    profile = load_profile(device) if isinstance(device, str) else device
    return resolve(MODELS[model], [profile], TARGETS, PlanRequest(**request))[0]


def with_memory(profile: DeviceProfile, ram_bytes: int) -> DeviceProfile:
    memory = {"value": ram_bytes, "source": "a test", "confidence": "recalled"}
    plain = profile.model_dump(mode="json") | {"ram": memory, "app_limits": []}
    if plain["vram"] is not None:
        plain["vram"] = memory
    plain["reserve"] = memory | {"value": min(plain["reserve"]["value"], 1 * GIB)}
    return DeviceProfile.model_validate_json(json.dumps(plain))


requests = st.fixed_dictionaries(
    {},
    optional={
        "context": st.sampled_from([64, 1024, 4096, 32768, 131072]),
        "sequences": st.integers(1, 16),
        "window": st.sampled_from([64, 512, 4096]),
        "kv_bits": st.sampled_from([4, 8, 16, 32]),
        "min_quality": st.sampled_from([0.0, 0.69, 0.89, 0.97]),
        "memory": st.integers(100 * MIB, 100 * GIB),
        "min_tokens_per_second": st.sampled_from([0.5, 5.0, 50.0]),
        "max_first_token": st.sampled_from([0.5, 10.0]),
        "prefer": st.sampled_from(["balanced", "speed", "memory", "quality"]),
        "target": st.sampled_from(["onnx", "mlx", "executorch"]),
    },
)


devices = st.sampled_from(sorted(PROFILES))


models = st.sampled_from(sorted(MODELS))


def taken(subject: str, profile: DeviceProfile, request: dict[str, Any]) -> Plan | None:
    try:
        return resolve(MODELS[subject], [profile], TARGETS, PlanRequest(**request))[0]
    except (DoesNotFit, Unsupported):
        return None


def rank(plan: Plan) -> tuple[int, float]:
    """Sort key that more memory must never worsen: the context given up, then the quality."""
    window, context = plan.cache.window, plan.context
    rung = 2 if window else 3 if plan.ladder and context < 8192 and "→ context" in plan.ladder[0].change else 0
    return rung, -float(window or context)


@settings(deadline=None, max_examples=30)
@given(models, devices, requests, st.none() | st.integers(2, 64), st.integers(1, 64))
def test_a_plan_fits_keeps_the_request_survives_json_and_is_not_worse_with_more_memory(
    model: str, device: str, request: dict[str, Any], ram_gib: int | None, more_gib: int
) -> None:
    own = PROFILES[device]
    profile = own if ram_gib is None else with_memory(own, ram_gib * GIB)
    plan = taken(model, profile, request)
    if plan is None:
        return
    budget = profile.budget()
    assert plan.estimate.private_bytes <= budget.private_bytes
    assert plan.estimate.total_bytes <= budget.total_bytes
    assert plan.estimate.private_bytes <= request.get("memory", plan.estimate.private_bytes)
    assert plan.speed.decode.low >= request.get("min_tokens_per_second", 0)
    assert plan.quality.same_top >= request.get("min_quality", 0)
    assert plan.sequences == request.get("sequences", 1)
    assert plan.storage.kv_bits == request.get("kv_bits", plan.storage.kv_bits)
    assert plan.storage.capacity_tokens <= plan.model.max_positions
    if "context" in request:
        assert plan.context == request["context"]
    if "window" in request:
        assert plan.cache.window == request["window"]
    elif "context" in request:
        assert plan.cache.window is None
    again = taken(model, profile, request)
    assert again is not None and plan.to_json() == again.to_json()
    assert validate(plan.to_json(), Plan, "a plan") == plan
    if ram_gib is None:
        return
    more = taken(model, with_memory(own, (ram_gib + more_gib) * GIB), request)
    assert more is not None, "it fitted less memory"
    assert rank(more) <= rank(plan)
    if rank(more) == rank(plan) and more.storage.kv_bits == plan.storage.kv_bits:  # a narrow cache may be faster
        if request.get("prefer", "balanced") == "quality":
            assert more.quality.loss <= plan.quality.loss
        if request.get("prefer") == "speed":
            assert more.speed.decode_tokens_per_s >= plan.speed.decode_tokens_per_s


def test_balanced_takes_four_bits_until_quality_asks_for_more() -> None:
    assert plan_for("LLAMA_32_1B", "macbook-m4-16gb").recipe.name == "balanced"
    assert plan_for("LLAMA_32_1B", "macbook-m4-16gb", min_quality=0.69).recipe.name == "balanced"
    assert plan_for("LLAMA_32_1B", "macbook-m4-16gb", min_quality=0.89).recipe.name == "s8"
    assert plan_for("LLAMA_32_1B", "macbook-m4-16gb", min_quality=0.99).recipe.name == "float16"


def test_quality_grows_as_far_as_memory_allows() -> None:
    assert plan_for("LLAMA_32_1B", "macbook-m4-16gb", prefer="quality", target="mlx").recipe.name == "float16"
    limit = 2 * GIB
    assert plan_for("LLAMA_32_1B", "macbook-m4-16gb", prefer="quality", target="mlx", memory=limit).recipe.name == "s8"


def test_preferred_speed_or_memory_is_the_best_that_fits() -> None:
    fastest = plan_for("LLAMA_31_8B", "rtx-4090", prefer="speed")
    smallest = plan_for("LLAMA_31_8B", "rtx-4090", prefer="memory")
    for candidate in fastest.rejected:
        if not candidate.failures and candidate.speed:
            assert candidate.speed.decode_tokens_per_s <= fastest.speed.decode_tokens_per_s
    for candidate in smallest.rejected:
        if not candidate.failures and candidate.estimate:
            assert candidate.estimate.total_bytes >= smallest.estimate.total_bytes


def test_the_ladder_gives_up_cache_bits_then_tokens_and_prices_each_step() -> None:
    roomy = plan_for("LLAMA_31_8B", "macbook-m4-16gb", target="mlx", recipe=RECIPES["s4-g64"])
    assert (roomy.context, roomy.storage.kv_bits, roomy.ladder) == (8192, 16, ())
    weights = roomy.estimate.total_bytes - roomy.estimate.kv_bytes
    for kept, found in (
        (roomy.estimate.kv_bytes * 6 // 10, (8192, None, 8)),
        (roomy.estimate.kv_bytes * 3 // 10, (8192, None, 4)),
        (roomy.estimate.kv_bytes // 8, (8192, 2048, 4)),
        (roomy.estimate.kv_bytes // 32, (8192, 512, 4)),
    ):
        limit = weights + kept
        plan = plan_for("LLAMA_31_8B", "macbook-m4-16gb", target="mlx", recipe=RECIPES["s4-g64"], memory=limit)
        assert (plan.context, plan.cache.window, plan.storage.kv_bits) == found
        assert plan.ladder[0].saved_bytes == roomy.estimate.total_bytes - plan.estimate.total_bytes


def test_an_explicit_context_is_never_reduced() -> None:
    limit = 5 * GIB
    with pytest.raises(DoesNotFit) as caught:
        plan_for("LLAMA_31_8B", "macbook-m4-16gb", target="mlx", context=32768, memory=limit)
    fixes = [failure.cure for candidate in caught.value.rejected["macbook-m4-16gb"] for failure in candidate.failures]
    assert any("context 32768 → " in fix and "a window of" in fix for fix in fixes)
    assert caught.value.exit_code == 3
    assert "macbook-m4-16gb:" in caught.value.table


def test_unsupported_cache_bits_name_the_supported_ones() -> None:
    assert plan_for("LLAMA_32_1B", "pixel-9", kv_bits=8).storage.kv_bits == 8
    with pytest.raises(DoesNotFit) as caught:
        plan_for("LLAMA_32_1B", "pixel-9", target="executorch", kv_bits=4)
    failures = {candidate.backend: candidate.failures for candidate in caught.value.rejected["pixel-9"]}
    found = next(each for each in failures["xnnpack"] if each.what == "cache bits")
    assert (found.found, found.allowed) == ("4", "32 or 8") and found.cure.startswith("--kv-bits 8")


def test_a_suggested_fix_fits() -> None:
    limit = 5 * GIB
    with pytest.raises(DoesNotFit) as caught:
        plan_for("LLAMA_31_8B", "macbook-m4-16gb", target="mlx", context=32768, memory=limit)
    rejected = next(each for each in caught.value.rejected["macbook-m4-16gb"] if each.recipe == "s4-g64")
    fix = rejected.failures[0].cure
    smaller = int(fix.split("context 32768 → ")[1].split(";")[0])
    common = {"target": "mlx", "recipe": RECIPES["s4-g64"], "memory": limit}
    bits = 16 if "cache bits" not in fix else 8
    plan = plan_for("LLAMA_31_8B", "macbook-m4-16gb", context=smaller, **common)
    assert plan.storage.kv_bits >= bits or plan.storage.kv_bits in (8, 4)
    over = smaller + 256
    fuller = plan_for("LLAMA_31_8B", "macbook-m4-16gb", context=over, **common)
    assert fuller.storage.kv_bits < 16, "the next larger context does not fit at full bits"


def test_larger_device_is_suggested() -> None:
    with pytest.raises(DoesNotFit) as caught:
        resolve(
            MODELS["LLAMA_31_8B"],
            [PROFILES["jetson-orin-nano-8gb"]],
            TARGETS,
            PlanRequest(target="onnx", recipe=RECIPES["float16"]),
            others=tuple(PROFILES.values()),
        )
    fixes = [
        failure.cure for candidate in caught.value.rejected["jetson-orin-nano-8gb"] for failure in candidate.failures
    ]
    assert any("Jetson AGX Orin" in fix and "and up" in fix for fix in fixes), fixes


def test_several_devices_share_the_best_recipe_that_fits_all_of_them() -> None:
    both = [PROFILES["macbook-m4-16gb"], PROFILES["raspberry-pi-5-8gb"]]
    plans = resolve(MODELS["LLAMA_32_1B"], both, TARGETS, PlanRequest(prefer="quality"))
    assert len({plan.recipe.name for plan in plans}) == 1


def test_devices_without_a_common_recipe_are_refused() -> None:
    both = [PROFILES["macbook-m4-16gb"], PROFILES["pixel-9"]]
    request = PlanRequest(recipe=RECIPES["float16"], target="mlx")
    with pytest.raises(
        Unsupported, match=r"pixel-9: mlx has nothing to offer here with recipe float16; this device runs"
    ):
        resolve(MODELS["LLAMA_32_1B"], both, TARGETS, request)


def test_every_rejected_offer_has_a_reason() -> None:
    plan = plan_for("LLAMA_31_8B", "laptop-x86-16gb", min_tokens_per_second=3.5)
    assert len(plan.rejected) >= 5
    for candidate in plan.rejected:
        assert candidate.reason
        for failure in candidate.failures:
            assert failure.found and failure.allowed and failure.cure


def test_a_vendors_own_format_is_taken_only_by_name() -> None:
    free = plan_for("LLAMA_32_1B", "macbook-m4-16gb", prefer="memory")
    assert not free.recipe.is_rare()
    assert not {candidate.recipe for candidate in free.rejected} & {*NATIVE_RECIPES, *GGUF_RECIPES, "small"}
    asked = plan_for("LLAMA_32_1B", "macbook-m4-16gb", recipe=NATIVE_RECIPES["mxfp4"])
    assert asked.target == "mlx"
    assert any("instead of the neutral weights" in note for note in asked.notes)


@pytest.mark.parametrize("prefer", ["balanced", "speed", "memory", "quality"])
def test_mlx_on_a_cpu_is_taken_only_by_name(prefer: str) -> None:
    free = plan_for("LLAMA_32_1B", "laptop-x86-8gb", prefer=prefer)
    assert free.target != "mlx"
    failed = [option.failures for option in free.rejected if option.target == "mlx"]
    assert failed and all(any(failure.cure == "--target mlx" for failure in failures) for failures in failed)
    asked = plan_for("LLAMA_32_1B", "laptop-x86-8gb", prefer=prefer, target="mlx")
    assert (asked.target, asked.backend) == ("mlx", "cpu")
    assert any("for checks" in note for note in asked.notes)
    (alone,) = resolve(MODELS["LLAMA_32_1B"], [PROFILES["laptop-x86-8gb"]], {"mlx": TARGETS["mlx"]}, PlanRequest())
    assert alone.target == "mlx", "a target that is taken by name is better than none"


def test_mlx_on_metal_needs_no_name() -> None:
    assert plan_for("LLAMA_32_1B", "macbook-m4-16gb").target == "mlx"


def test_custom_recipe_is_planned_if_its_formats_are_known() -> None:
    rules = (
        Rule(pattern="*.down_proj", format=Format(kind="s8")),
        Rule(pattern="*", format=Format(kind="s4", group=32)),
    )
    plan = plan_for("LLAMA_32_1B", "laptop-x86-16gb", recipe=Recipe(name="mine", rules=rules), target="onnx")
    assert plan.recipe.name == "mine"


def test_a_group_that_does_not_divide_is_noted() -> None:
    config = shapes.LLAMA_32_1B | {"intermediate_size": 8160}
    subject = PlanSubject(shapes.spec_of(config), "odd", "0" * 64)
    plan = resolve(
        subject, [PROFILES["laptop-x86-16gb"]], TARGETS, PlanRequest(recipe=RECIPES["s4-g128"], target="onnx")
    )[0]
    assert any("16 tensors are stored as s4-g32" in note for note in plan.notes)


def test_a_draft_model_is_counted() -> None:
    alone = plan_for("LLAMA_31_8B", "rtx-4090")
    subject = MODELS["LLAMA_31_8B"]._replace(draft=MODELS["LLAMA_32_1B"].model, draft_source="small")
    drafting = resolve(subject, [PROFILES["rtx-4090"]], TARGETS, PlanRequest())[0]
    assert drafting.estimate.draft_bytes > 0.5 * GIB
    verified = (LONE_VERIFIED_ROWS * 5 // 4 - 1) * MODELS["LLAMA_31_8B"].model.vocab_size * 4
    assert drafting.estimate.total_bytes == alone.estimate.total_bytes + drafting.estimate.draft_bytes + verified
    assert drafting.draft == "small"


def test_a_model_that_cannot_be_exported_is_planned_and_marked() -> None:
    subject = PlanSubject(shapes.spec_of(GEMMA_3N_E2B), "gemma3n", "0" * 64)
    plan = resolve(subject, [PROFILES["macbook-m4-16gb"]], TARGETS, PlanRequest())[0]
    assert any("cannot be exported" in note for note in plan.notes)


def test_a_mixture_is_planned_by_what_a_token_reads() -> None:
    """Qwen3-30B-A3B multiplies a token with 3.0 of its 30.5 billion weights."""
    subject = PlanSubject(shapes.spec_of(QWEN_3_30B_A3B), "experts", "0" * 64)
    request = PlanRequest(target="mlx", recipe=named_recipe("s4-g64"))
    plan = resolve(subject, [PROFILES["m4-max-64gb"]], TARGETS, request)[0]
    stored = stored_weight_bytes(plan.model, plan.recipe, plan.memory)
    touched = touched_weight_bytes(plan.model, plan.recipe, plan.memory)
    assert 0.09 < touched / stored < 0.12
    note = f"one token reads {show_bytes(touched)} of {show_bytes(stored)} of weights: 8 of 128 experts in 48 layers"
    assert note in plan.notes
    assert f"{touched / 1e6:,.0f} MB of weights" in plan.speed.basis


def test_a_plan_says_the_price_of_a_narrow_cache() -> None:
    """XNNPACK widens 8 bits before it attends, which takes longer than reading 32; onnx gains by them."""
    asked = {"context": 8192, "target": "executorch"}
    wide, narrow = (plan_for("LLAMA_32_1B", "laptop-x86-16gb", kv_bits=bits, **asked) for bits in (32, 8))
    assert narrow.speed.decode_tokens_per_s < wide.speed.decode_tokens_per_s
    price = f"{narrow.speed.decode_tokens_per_s:g} instead of {wide.speed.decode_tokens_per_s:g} decoded tokens"
    assert [note for note in narrow.notes if price in note] and not [note for note in wide.notes if "instead" in note]
    assert "the cache of 8 bits at" in narrow.speed.basis
    onnx = plan_for("LLAMA_32_1B", "laptop-x86-16gb", context=8192, target="onnx", kv_bits=8)
    assert not [note for note in onnx.notes if "decoded tokens a second" in note]


@pytest.mark.parametrize(("window", "sinks"), [(4, 4), (10, 9), (1, 0)], ids=["all sinks", "no block", "one token"])
def test_window_too_small_for_its_sinks_is_refused_in_one_line(window: int, sinks: int) -> None:
    with pytest.raises(InvalidInput, match="--window") as caught:
        plan_for("LLAMA_32_1B", "laptop-x86-16gb", window=window, sinks=sinks)
    assert "\n" not in str(caught.value)


def test_a_plan_takes_a_budget_of_bits() -> None:
    (plan,) = make_plans("demo", ["this"], PlanRequest(bits_per_weight=5.3))
    (coarse,) = make_plans("demo", ["this"], PlanRequest(bits_per_weight=4.9, recipe=named_recipe("s4-g128")))
    assert plan.recipe.name == "balanced-to-5.3"
    assert budget_bytes(plan.recipe, plan.model) == int(plan.model.parameters * 5.3 / 8)
    assert budget_bytes(coarse.recipe, coarse.model) == int(plan.model.parameters * 4.9 / 8)
    with pytest.raises(InvalidInput, match=r"needs at least 4\.5"):
        make_plans("demo", ["this"], PlanRequest(bits_per_weight=4.4))
    with pytest.raises(DoesNotFit, match=r"needs at least 5\.01"):  # its table has 8 bits
        make_plans("demo", ["this"], PlanRequest(bits_per_weight=4.8, target="executorch"))


@pytest.mark.parametrize(("target", "kind"), [("onnx", "s4"), ("llamacpp", "s4"), ("mlx", "s4"), ("executorch", "s8")])
def test_an_embedding_that_is_only_looked_up_takes_four_bits_where_it_can(target: str, kind: str) -> None:
    request = PlanRequest(target=target, recipe=RECIPES["balanced"], context=512)
    device, own = [PROFILES["macbook-m4-16gb" if target == "mlx" else "laptop-x86-16gb"]], MODELS["LLAMA_31_8B"]
    stored, shared = own._replace(is_stored=True), MODELS["LLAMA_32_1B"]
    for subject, expected in ((own, kind), (stored, "s8"), (shared, "s8")):
        (plan,) = resolve(subject, device, TARGETS, request)
        assert plan.recipe.format_of(next(iter(plan.model.tensors()))).kind == expected


BOARD = "raspberry-pi-5-8gb"


def test_a_profile_plans_as_its_name_does() -> None:
    profile = edgekit.load_profile(BOARD)
    kiosk = profile.model_copy(update={"name": "kiosk"})
    named = edgekit.plan("demo", BOARD)
    assert edgekit.plan("demo", profile) == named
    first, second = edgekit.plan("demo", [profile, kiosk])
    assert first == named
    assert (second.device, second.estimate) == ("kiosk", named.estimate)


def test_an_export_takes_a_profile(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    kiosk = edgekit.load_profile(BOARD).model_copy(update={"name": "kiosk"})
    made = edgekit.export(
        "demo-draft", tmp_path / "kiosk", kiosk, context=64, recipe="s8", effort="quick", store=tmp_path / "store"
    )
    assert made.manifest.plan.device == "kiosk"


PROFILES_OF_PUBLISHED_SPEEDS = {name: profile for name, profile in all_profiles().items() if profile.measured}


MODELS_OF_PUBLISHED_SPEEDS = {
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
    model = shapes.spec_of(MODELS_OF_PUBLISHED_SPEEDS[row.model], row.model)
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


@pytest.mark.parametrize("name", PROFILES_OF_PUBLISHED_SPEEDS)
def test_a_profile_gives_every_figure_that_it_cites(name: str) -> None:
    for engine, what, ratio in ratios(PROFILES_OF_PUBLISHED_SPEEDS[name]):
        assert 0.9 <= ratio <= 1.1, f"{engine} {what}: predicted {ratio:.2f} of the published speed"


def test_published_figures_lie_in_the_range_that_is_shown() -> None:
    for profile in PROFILES_OF_PUBLISHED_SPEEDS.values():
        for row in profile.measured:
            speed = predicted(profile, row)
            assert speed.origin == "published for this chip and engine"
            low, expected, high = speed.decode
            assert low <= 0.9 * expected and high >= 1.1 * expected
            assert row.decode_tokens_per_s is None or low <= row.decode_tokens_per_s <= high


def test_the_page_about_profiles_prints_these_errors() -> None:
    by_engine: dict[str, dict[str, list[float]]] = {}
    devices: dict[str, set[str]] = {}
    for profile in PROFILES_OF_PUBLISHED_SPEEDS.values():
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
