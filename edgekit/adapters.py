"""Reads LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`, and nothing else.

What an adapter asks for and cannot have here (DoRA, adapted tables, trained biases, copies of whole modules) is refused
by name. Every shape is checked against the model before a weight is read. Knows no engine.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edgekit.errors import InvalidInput, Unsupported, clip
from edgekit.model import ModelSpec
from edgekit.reading import parse_json, read_bytes
from edgekit.weights.safetensors import TensorFolder, refuse_pickle

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 1024
_MAX_CONFIG_BYTES = 4 << 20
_MAX_PATTERNS = 4096
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_PLAIN = re.compile(r"[A-Za-z0-9_.]{1,200}")

_REFUSED = {
    "use_dora": "DoRA scales whole rows of the base; merge it into the weights before quantising",
    "modules_to_save": "copies of whole modules are no low-rank change; merge them into the weights before quantising",
    "trainable_token_indices": "trained rows of the embedding; merge them into the weights before quantising",
    "layer_replication": "the adapter repeats layers; build that model first, then export it",
    "fan_in_fan_out": "weights of this model stand as [outputs, inputs]; train with fan_in_fan_out false",
    "lora_bias": "biases of an adapter are not added; train without them, or merge it before quantising",
    "target_parameters": "bare parameters cannot be adapted; train on linears, or merge it before quantising",
    "alora_invocation_tokens": "an adapter that only some tokens switch on; train without aLoRA",
}
# What says nothing about the forward pass, or is told by the tensors themselves.
_HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# With these the base that was trained on is not the model's own.
_MOVED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LowRank(NamedTuple):
    """What an adapter adds to a module: `x · aᵀ · bᵀ`, the scale being in `b` already."""

    a: Floats  # [rank, inputs]
    b: Floats  # [outputs, rank]


class Adapter(NamedTuple):
    """One adapter, read whole. `modules` are named as `ModelSpec` names them."""

    modules: Mapping[str, LowRank]
    rank: int  # the largest of any module
    sha256: str

    @property
    def parameters(self) -> int:
        return sum(part.a.size + part.b.size for part in self.modules.values())


def check_adapter_name(name: str) -> str:
    """`name`, if it may stand in a request, a key and a message."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput(f"adapter name {clip(name)}: letters, digits, '_', '.' and '-', at most 64, are allowed")
    return name


def adaptable(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of every module that an adapter may change."""
    return {
        tensor.module: (tensor.shape[0], tensor.shape[1])
        for tensor in model.tensors()
        if tensor.role == "linear" and tensor.name.endswith(".weight") and len(tensor.shape) == 2
    }


def read_adapter(folder: Path, model: ModelSpec, *, most_rank: int = MAX_RANK) -> Adapter:
    """The adapter in a PEFT folder, for this model; refused unless it can be honoured to the last tensor."""
    place = folder / CONFIG
    data = read_bytes(place, _MAX_CONFIG_BYTES)
    said = _Said(place, parse_json(data, str(place)))
    if said.most_rank > most_rank:
        raise Unsupported(
            f"{place}: rank {said.most_rank}, and this artifact has room for rank {most_rank}; "
            f"export it again with --adapter-rank {said.most_rank}"
        )
    if not (folder / WEIGHTS).is_file():
        for path in sorted(folder.glob("adapter_model*")):
            refuse_pickle(path)
        raise InvalidInput(f"{folder}: holds no {WEIGHTS}; is this an adapter as PEFT saves it?")
    sizes = adaptable(model)
    with TensorFolder.open(folder / WEIGHTS) as tensors:
        pairs = _pairs(folder / WEIGHTS, tensors, model, sizes)
        modules, digest = {}, hashlib.sha256()
        for module, (first, second) in sorted(pairs.items()):
            said.check_targeted(module)
            rank, scale = said.rank_and_scale(module)
            outputs, inputs = sizes[module]
            for name, expected in ((first, (rank, inputs)), (second, (outputs, rank))):
                found = tensors.entry(name).shape
                if found != expected:
                    raise InvalidInput(
                        f"{folder / WEIGHTS}: tensor {clip(name)} has the shape {list(found)}, expected "
                        f"{list(expected)}; is the adapter of this model?"
                    )
            a, b = _finite(tensors, first, folder), _finite(tensors, second, folder)
            modules[module] = LowRank(a, b * a.dtype.type(scale))
            for part in (module.encode(), a.tobytes(), modules[module].b.tobytes()):
                digest.update(len(part).to_bytes(8, "little") + part)
    return Adapter(modules, max(len(part.a) for part in modules.values()), digest.hexdigest())


def _pairs(
    place: Path, tensors: TensorFolder, model: ModelSpec, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[str, str]]:
    """For every adapted module, the names of its two tensors."""
    sides: dict[str, dict[str, str]] = {}
    for name in tensors.entries:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise Unsupported(f"{place}: tensor {clip(name)}: {_what_it_is(name)}")
        module = match["module"]
        if module not in sizes:
            if module in (model.head, f"{model.prefix}embed_tokens"):
                raise Unsupported(
                    f"{place}: adapts {module}; embedding and head cannot be adapted, only the linears of the layers"
                )
            raise InvalidInput(
                f"{place}: adapts {clip(module)}, which {model.name} does not have; is it of this model?"
            )
        sides.setdefault(module, {})[match["side"]] = name
    if not sides:
        raise InvalidInput(f"{place}: holds no tensors; train and save the adapter again")
    for module, found in sides.items():
        if len(found) < 2:
            raise InvalidInput(f"{place}: {module} has only one of lora_A and lora_B; is the file complete?")
    return {module: (found["A"], found["B"]) for module, found in sides.items()}


def _what_it_is(name: str) -> str:
    if "lora_embedding" in name:
        return "adapted embeddings are not supported; merge the adapter into the weights before quantising"
    if "lora_magnitude" in name:
        return _REFUSED["use_dora"]
    if name.endswith(".bias") or ".lora_bias" in name:
        return _REFUSED["lora_bias"]
    return "is no part of a LoRA as PEFT saves one; merge it into the weights before quantising"


def _finite(tensors: TensorFolder, name: str, folder: Path) -> Floats:
    import numpy as np

    values = tensors.floats(name)
    if not np.isfinite(values).all():
        raise InvalidInput(f"{folder / WEIGHTS}: tensor {clip(name)} holds NaN or infinity; train the adapter again")
    return values


class _Said:
    """What `adapter_config.json` says, checked."""

    def __init__(self, place: Path, said: Mapping[str, Any]) -> None:
        self._place = place
        self._refuse(said)
        self._rank = self._whole(said.get("r"), "r")
        self._alpha = self._number(said.get("lora_alpha", 8), "lora_alpha")
        self._by_root = said.get("use_rslora") is True
        self._ranks = {key: self._whole(value, "rank_pattern") for key, value in self._pattern(said, "rank_pattern")}
        self._alphas = {
            key: self._number(value, "alpha_pattern") for key, value in self._pattern(said, "alpha_pattern")
        }
        targets = said.get("target_modules")
        self._targets: Sequence[str] | None = None  # None: an expression, which only PEFT reads
        if isinstance(targets, list) and all(isinstance(each, str) for each in targets):
            self._targets = targets
        elif targets is not None and not isinstance(targets, str):
            raise InvalidInput(f"{place}: target_modules: {clip(targets)} is neither a list of names nor an expression")

    @property
    def most_rank(self) -> int:
        return max([self._rank, *self._ranks.values()])

    def check_targeted(self, module: str) -> None:
        """PEFT itself leaves out tensors of modules that are not among its targets."""
        if self._targets is None or any(module == each or module.endswith(f".{each}") for each in self._targets):
            return
        raise InvalidInput(
            f"{self._place}: target_modules {clip(self._targets)} does not name {module}, which has tensors"
        )

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """The rank of a module, and what its product is multiplied by."""
        rank = _found(self._ranks, module, self._rank)
        alpha = _found(self._alphas, module, self._alpha)
        return int(rank), alpha / (math.sqrt(rank) if self._by_root else rank)

    def _refuse(self, said: Mapping[str, Any]) -> None:
        kind, task, bias = said.get("peft_type"), said.get("task_type"), said.get("bias", "none")
        if kind != "LORA":
            raise Unsupported(f"{self._place}: peft_type {clip(kind)}; only LORA adapters can be loaded")
        if task not in (None, "CAUSAL_LM"):
            raise Unsupported(f"{self._place}: task_type {clip(task)}; only CAUSAL_LM adapters can be loaded")
        if bias != "none":
            raise Unsupported(f"{self._place}: bias {clip(bias)}: {_REFUSED['lora_bias']}")
        start = said.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_MOVED_BASES):
            raise Unsupported(
                f"{self._place}: init_lora_weights {clip(start)} changes the base too; convert the adapter when you "
                "save it (path_initial_model_for_weight_conversion)"
            )
        for name, value in said.items():
            if name in _HARMLESS or not value:
                continue
            reason = _REFUSED.get(name, "is not understood here; merge the adapter into the weights before quantising")
            raise Unsupported(f"{self._place}: {clip(name)} {clip(value)}: {reason}")

    def _pattern(self, said: Mapping[str, Any], field: str) -> Iterator[tuple[str, Any]]:
        found = said.get(field) or {}
        if not isinstance(found, dict) or len(found) > _MAX_PATTERNS:
            raise InvalidInput(f"{self._place}: {field}: {clip(found)} is not an object of module names")
        for key, value in found.items():
            # PEFT reads these as regular expressions, which from strangers may run for ever.
            if not _PLAIN.fullmatch(key.removeprefix("^")):
                raise Unsupported(f"{self._place}: {field} {clip(key)}: write module names, not expressions")
            yield key, value

    def _whole(self, value: Any, field: str) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise InvalidInput(f"{self._place}: {field}: must be a rank from 1 to {MAX_RANK}, found {clip(value)}")
        return value

    def _number(self, value: Any, field: str) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e6:
            raise InvalidInput(f"{self._place}: {field}: must be a finite number, found {clip(value)}")
        return float(value)


def _found(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    """The first pattern that names the module or its end; one that begins with `^` names it whole."""
    for key, value in patterns.items():
        if module == key.removeprefix("^") or module.endswith(f".{key}"):
            return value
    return otherwise
