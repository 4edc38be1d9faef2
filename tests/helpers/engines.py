"""Tiny models as files of any target, made once a machine: what the tests of targets open."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import family_models as models
import numpy as np
import pytest
from eagle3_heads import write_head
from kept import EXPORTS, kept

from edgekit.artifact.artifact import seal
from edgekit.contracts import recurrent
from edgekit.contracts.engine import Chunk, Engine, State
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Recipe, named_recipe
from edgekit.model.heads import read_head
from edgekit.plugins import load_target

ENGINES = {"onnx": "OnnxEngine", "mlx": "MlxEngine", "executorch": "ExecutorchEngine", "llamacpp": "LlamaCppEngine"}
PLANS: dict[str, dict[str, Any]] = {
    "onnx": {"chunk_tokens": 16},
    "mlx": {"backend": "cpu"},
    "executorch": {"context": 96, "chunk_tokens": 16, "sequences": 3, "backend": "xnnpack"},
    "llamacpp": {"kv_bits": 16},
}


class Model(NamedTuple):
    """The files of a target, which tests open, and where they came from."""

    plan: Plan
    files: Path
    weights: NeutralWeights
    folder: Path  # of the float model

    def open(self, *, exact: bool = False, kv_bits: int = 0, **plan: Any) -> Any:
        """An engine; one that offers only a cache of `kv_bits`, if they are given."""
        kind = getattr(import_module(f"edgekit_{self.plan.target}.engine"), ENGINES[self.plan.target])
        engine = kind(self.plan.model_copy(update=plan), self.files, exact=exact)
        if kv_bits:
            engine.capabilities = engine.capabilities.model_copy(update={"kv_bits": (kv_bits,)})
        return engine

    def copied(self, folder: Path) -> Model:
        """The same files in `folder`, where a test may damage them."""
        return self._replace(files=Path(shutil.copytree(self.files, folder / "out")))

    def sealed(self, folder: Path) -> Model:
        """The same files as a sealed artifact in `folder`."""
        files = folder / "artifact"
        seal(self.copied(folder).files, files, self.plan, weights_sha256="0" * 64, tools={}, self_check="none")
        return self._replace(files=files)

    def reference(self) -> Any:
        """transformers' model with the dequantised weights."""
        return _reference(self.folder, self.weights.folder)

    def logits(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """What transformers computes with these weights."""
        return models.logits_of(self.reference(), tokens)


def row(target: str, *values: Any, marks: tuple[Any, ...] = (), name: str = "") -> Any:
    """A row of a matrix, whose first value is a target."""
    usual = [getattr(pytest.mark, target), pytest.mark.quantize, *marks]
    usual += [pytest.mark.slow] if target == "executorch" else []
    return pytest.param(target, *values, marks=usual, id=f"{target}-{name}" if name else None)


def make_model(
    target: str,
    family: str,
    recipe: Recipe | str = "s4-g32",
    level: int | None = None,
    *,
    head: tuple[int, ...] = (),
    config: dict[str, Any] | None = None,
    layers: int | None = None,
    adapter_rank: int = 0,
    **plan: Any,
) -> Model:
    """A family's tiny model on a target. `head`: the layers after which a drafting head reads hidden states.

    `level`: accuracy_level of onnx's graphs, by default the exact one. `layers`: how many of the model's are left, two
    on executorch unless told otherwise, because lowering takes seconds.
    """
    pytest.importorskip("transformers")
    if missing := load_target(target).missing():
        pytest.skip(missing)
    model, weights = weights_of(target, family, recipe, config=config, layers=layers or 2 * (target == "executorch"))
    if head:
        with tempfile.TemporaryDirectory() as folder:
            written = write_head(Path(folder) / "head", weights.model, layers=head)
            plan["drafter"] = read_head(written, weights.model).spec
    made = models.plan_for(weights.model, weights.recipe, **{**PLANS[target], **plan})
    made = made.model_copy(update={"target": target, "adapter_rank": adapter_rank})
    if target in ("mlx", "llamacpp"):  # whose files do not depend on them
        exported = made.model_copy(update={"drafter": None, "adapter_rank": 0})
    else:
        exported = made
    sources, key = (*EXPORTS, f"targets/edgekit_{target}"), (exported.to_json(), weights.sha256, str(level))
    return Model(made, kept(partial(_export, exported, weights, level), sources, *key), weights, model)


onnx_model = partial(make_model, "onnx")
mlx_model = partial(make_model, "mlx")
llamacpp_model = partial(make_model, "llamacpp")
program = partial(make_model, "executorch")


def weights_of(
    target: str,
    family: str,
    recipe: Recipe | str = "s4-g32",
    *,
    config: dict[str, Any] | None = None,
    layers: int | None = None,
) -> tuple[Path, NeutralWeights]:
    """A family's tiny model in floats, and its neutral weights."""
    model = float_model(target, family, json.dumps(config or {}), layers)
    chosen = named_recipe(recipe) if isinstance(recipe, str) else recipe
    return model, NeutralWeights.open(_weights(model, chosen))  # opened anew: each has files and maps


@cache
def float_model(target: str, family: str, config: str = "{}", layers: int | None = None) -> Path:
    """A family's tiny model in floats, as `save_pretrained` writes it; `config`: changes of it, as JSON."""
    kind, usual = models.OF_TARGETS[target][family]
    changed = {**usual, **json.loads(config)}
    if layers:
        changed["num_hidden_layers"] = layers
        for by_layer in {"layer_types", "no_rope_layers"} & set(changed):
            changed[by_layer] = changed[by_layer][:layers]
    name = family.replace(" ", "-").replace(",", "")

    def write(folder: Path) -> None:
        models.write_model(folder / name, kind, changed)

    return kept(write, (), name, kind, json.dumps(changed)) / name


@cache
def _weights(model: Path, recipe: Recipe) -> Path:
    key = (str(model), recipe.model_dump_json())
    store = kept(lambda folder: models.weights_of(model, recipe, folder) and None, EXPORTS, *key)
    return next(place for place in store.iterdir() if not place.name.startswith("."))


def _export(plan: Plan, weights: NeutralWeights, level: int | None, folder: Path) -> None:
    folder.mkdir()
    module = import_module(f"edgekit_{plan.target}.export")
    if plan.target == "onnx":
        module.export(plan, weights, folder, models.quiet, accuracy_level=module.EXACT if level is None else level)
    elif plan.target == "executorch":
        lower(plan, weights, folder)
    else:
        module.export(plan, weights, folder, models.quiet)


def lower(plan: Plan, weights: NeutralWeights, folder: Path) -> None:
    """Write an executorch program without a word on the terminal."""
    from edgekit_executorch import export, layout, quiet

    with quiet.quiet_output():
        export.lower(plan, weights, folder / layout.PROGRAM, models.quiet)


@cache
def _reference(model: Path, weights: Path) -> Any:
    return models.reference_of(model, NeutralWeights.open(weights))


def storage_of(engine: Engine, bits: int, capacity: int | None = None) -> KVCacheConfig:
    return KVCacheConfig(capacity_tokens=capacity or engine.plan.storage.capacity_tokens, kv_bits=bits)


def fed(engine: Engine, state: State, tokens: list[int], sizes: list[int]) -> np.ndarray[Any, Any]:
    """The logits of every token, fed in pieces whose sizes repeat."""
    found, place, turn = [], 0, 0
    while place < len(tokens):
        piece = tokens[place : place + sizes[turn % len(sizes)]]
        found.append(engine.forward([Chunk(state, piece, len(piece))])[0])
        place, turn = place + len(piece), turn + 1
    return np.concatenate(found)


def fed_under(
    engine: Engine, state: State, tokens: list[int], policy: KVEvictionPolicy, size: int
) -> np.ndarray[Any, Any]:
    """Feed as the scheduler does: evict the oldest block before a forward, and cut chunks at that boundary."""
    found, place = [], 0
    while place < len(tokens):
        gone = policy.eviction(state.length)
        if gone:
            state.evict(*gone)
        room = policy.remaining_capacity(state.length)
        piece = tokens[place : place + min(size, room or size)]
        found.append(engine.forward([Chunk(state, piece, len(piece))])[0])
        place += len(piece)
    return np.concatenate(found)


def apart(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The largest difference, as a share of the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def spaced(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Set the least tokens between two checkpoints of a recurrent part, which capabilities state too."""
    monkeypatch.setattr(recurrent, "LEAST_TOKENS", tokens)
    if find_spec("onnxruntime"):
        from edgekit_onnx.capabilities import capabilities

        monkeypatch.setattr("edgekit_onnx.engine.capabilities", capabilities.__wrapped__)
