"""The executorch target refuses unsupported plans with a fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from edgekit_executorch import ExecutorchTarget
from edgekit_executorch.capabilities import capabilities
from edgekit_executorch.export import content_key, export
from edgekit_executorch.memory import facts, memory_terms, weight_shares
from edgekit_executorch.versions import clash

from edgekit.contracts.memory import TOKEN_FILE_BYTES, MemoryLoad, total
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import RECIPES
from edgekit.contracts.stored_weights import stored_weight_bytes
from edgekit.device.load import load_profile
from edgekit.errors import TargetMissing
from edgekit.model.parts import Layer
from edgekit.model.spec import ModelSpec
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.testing import fake_model, fake_plan

VERSIONS = {"executorch": "1.5.1", "torch": "2.13.0+cpu", "torchao": "0.18.0"}


def plan(**changes: object) -> Plan:
    base = fake_plan()
    storage = base.storage.model_copy(update={"kv_bits": 32})
    return base.model_copy(update={"target": "executorch", "backend": "xnnpack", "storage": storage, **changes})


def test_windows_of_two_widths_are_refused() -> None:
    model = fake_model()
    mixed = model.model_copy(
        update={"layers": tuple(Layer(kv_heads=1, head_dim=32, window=window) for window in (128, 256))}
    )
    assert capabilities(model, RECIPES["s4-g32"], "xnnpack").refusal is None
    assert "only one width" in (capabilities(mixed, RECIPES["s4-g32"], "xnnpack").refusal or "")


def test_tied_head_takes_memory_and_no_file_bytes() -> None:
    model = fake_model(vocabulary=4096)
    untied = model.model_copy(update={"tied": False})
    tied, apart = (weight_shares(spec, RECIPES["s4-g32"], "xnnpack") for spec in (model, untied))
    for spec in (model, untied):
        load = _load(spec)
        stored = stored_weight_bytes(spec, load.recipe, load.facts) + TOKEN_FILE_BYTES * spec.vocab_size
        assert total(memory_terms(load), "disk_bytes") == stored
    # Packing adds a little to each row; the table that tokens are looked up in is mapped.
    assert 1 < sum(apart) < 1.1
    assert 1 + tied[0] < sum(tied) < 1.1 * (1 + tied[0])
    assert tied[1] > apart[1] + 0.9 * apart[0]


def test_xnnpack_stores_every_float_recipe_in_32_bits() -> None:
    model = fake_model(vocabulary=4096)
    loads = [_load(model)._replace(recipe=RECIPES[recipe]) for recipe in ("float32", "float16")]
    taken = [total(memory_terms(load), "mapped_weights_bytes", "private_weights_bytes") for load in loads]
    assert taken[0] == pytest.approx(taken[1], rel=1e-6)


def test_a_program_for_a_phone_counts_python_where_python_runs_it() -> None:
    """The default export of SmolLM2 for a phone was predicted to take half of what it takes here."""
    wish = PlanRequest(target="executorch", recipe=RECIPES["s4-g32"], context=256)
    phone, desktop = make_plans("demo", ["pixel-9", "laptop-x86-8gb"], wish)
    here = ExecutorchTarget().adapt(phone)
    assert here.memory.runtime_bytes == desktop.memory.runtime_bytes > 4 * phone.memory.runtime_bytes
    assert "where it was not run" in phone.memory.source and "Python included" in here.memory.source
    assert ExecutorchTarget().adapt(desktop) == desktop


def test_windowed_layers_share_one_mask_which_is_counted() -> None:
    model = fake_model(vocabulary=4096)
    windowed = model.model_copy(
        update={"layers": tuple(layer.model_copy(update={"window": 64}) for layer in model.layers)}
    )
    mixed = model.model_copy(update={"layers": (*windowed.layers, *model.layers)})
    masks = [
        next(term.bytes for term in memory_terms(_load(each)) if "masks" in term.why)
        for each in (model, mixed, windowed)
    ]
    assert masks == [0, 64 * 512 * 4, 64 * 512 * 4]


def _load(model: ModelSpec) -> MemoryLoad:
    stored = facts(load_profile("pixel-9"), "xnnpack").model_copy(update={"tokenizer_bytes": 0})
    return MemoryLoad(model, RECIPES["s4-g32"], "xnnpack", stored, 512, sequences=1, kv_bits=32, chunk_tokens=64)


def test_offers_that_never_ran_are_noted() -> None:
    for offer in ExecutorchTarget().offers(fake_model(), load_profile("iphone-16")):
        assert (offer.notes == ()) == (offer.backend == "xnnpack"), offer.backend


def test_second_copy_of_tied_table_is_noted() -> None:
    device, model = load_profile("iphone-16"), fake_model(vocabulary=4096)
    offered = ExecutorchTarget().offer(model, device, "coreml", RECIPES["float16"])
    assert any("the tied token embedding takes 512 KiB more" in note for note in offered.notes), offered.notes
    load = _load(model)._replace(recipe=RECIPES["float16"], backend="coreml")
    stored = stored_weight_bytes(model, load.recipe, load.facts)
    assert total(memory_terms(load), "disk_bytes") > 1.3 * stored
    untied = model.model_copy(update={"tied": False})
    apart = ExecutorchTarget().offer(untied, device, "coreml", RECIPES["float16"])
    assert not any("tied" in note for note in apart.notes)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({}, r"executorch is not installed; pip install 'edgekit\[executorch\]'"),
        ({**VERSIONS, "executorch": "2.0.0"}, "never tested with this edgekit, which knows 1.5"),
        ({**VERSIONS, "torch": "2.9.1"}, r"built for torch 2.13, found 2.9.1; pip install 'torch~=2.13.0'"),
        ({**VERSIONS, "torchao": "0.14.0"}, r"built for torchao 0.18, found 0.14.0"),
        ({"executorch": "1.5.1", "torch": "2.13.0"}, "needs torchao 0.18, which is not installed"),
    ],
    ids=["nothing", "another executorch", "another torch", "another torchao", "no torchao"],
)
def test_incompatible_versions_are_named(found: dict[str, str], named: str) -> None:
    assert clash(VERSIONS, to_export=True) is None
    assert re.search(named, clash(found, to_export=True) or "")


def test_running_needs_no_torchao() -> None:
    assert clash({"executorch": "1.5.1", "torch": "2.13.0"}) is None


def test_incompatible_pair_stops_export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("edgekit_executorch.versions.versions", lambda: {**VERSIONS, "torch": "2.9.1"})
    with pytest.raises(TargetMissing, match=r"torch~=2\.13"):
        export(plan(), None, tmp_path, lambda done, total, what: None)  # type: ignore[arg-type]


def test_content_key_depends_on_program_inputs(tmp_path: Path) -> None:
    class Weights:
        sha256 = "0" * 64

    def key(**changes: object) -> str:
        return content_key(plan(**changes), Weights())  # type: ignore[arg-type]

    assert key() == key(device="another", threads=7)
    assert len({key(), key(context=256), key(chunk_tokens=32), key(backend="coreml")}) == 4
