"""Reads LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Unsupported features (DoRA, adapted embeddings, trained biases, copies of whole modules) are refused by name. Every
shape is checked against the model before a weight is read.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edgekit.common.files import copy_file
from edgekit.common.parsing import parse_json, read_bytes
from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.formats.safetensors import TensorFolder, refuse_pickle
from edgekit.model.spec import ModelSpec

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
    "modules_to_save": "copies of whole modules are not low-rank; merge them into the weights before quantising",
    "trainable_token_indices": "trained rows of the embedding; merge them into the weights before quantising",
    "layer_replication": "the adapter repeats layers; build that model first, then export it",
    "fan_in_fan_out": "this model stores weights as [outputs, inputs]; train with fan_in_fan_out false",
    "lora_bias": "biases of an adapter are not added; train without them, or merge it before quantising",
    "target_parameters": "bare parameters cannot be adapted; train on linears, or merge it before quantising",
    "alora_invocation_tokens": "an adapter that only some tokens switch on; train without aLoRA",
}
# Fields that do not affect the forward pass, or that follow from the tensors.
_HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# These initialisations change the base weights too.
_MOVED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LowRank(NamedTuple):
    """The term that an adapter adds to a module: `x · aᵀ · bᵀ`. `b` includes the scale."""

    a: Floats  # [rank, inputs]
    b: Floats  # [outputs, rank]


class LoraAdapter(NamedTuple):
    """One adapter in memory. `modules` has the names of `ModelSpec`."""

    modules: Mapping[str, LowRank]
    rank: int  # the largest of any module
    sha256: str


_MOST_VALUE = 65_504  # of float16: larger values overflow in products, and no trained adapter has them


def check_adapter_name(name: str) -> str:
    """Return `name` if it is a valid adapter name. Raises `InvalidInput`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput(
            f"adapter name {quote_short(name)}: letters, digits, '_', '.' and '-', at most 64, are allowed"
        )
    return name


def copy_adapter(folder: Path, place: Path) -> None:
    """Copy the two files of a PEFT folder to a new folder."""
    place.mkdir(parents=True)
    for file in (CONFIG, WEIGHTS):
        copy_file(folder / file, place / file)


def adaptable(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the shape [outputs, inputs] of every module that an adapter may change."""
    return {
        tensor.module: (tensor.shape[0], tensor.shape[1])
        for tensor in model.tensors()
        if tensor.role == "linear" and tensor.name.endswith(".weight") and len(tensor.shape) == 2
    }


def read_adapter(folder: Path, model: ModelSpec, *, most_rank: int = MAX_RANK) -> LoraAdapter:
    """Read the adapter in a PEFT folder for `model`. Raises unless every tensor and option can be applied."""
    place = folder / CONFIG
    data = read_bytes(place, _MAX_CONFIG_BYTES)
    config = _AdapterConfig(place, parse_json(data, str(place)))
    if config.most_rank > most_rank:
        raise Unsupported(
            f"{place}: rank {config.most_rank}, and this artifact has room for rank {most_rank}; "
            f"export it again with --adapter-rank {config.most_rank}"
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
            config.check_targeted(module)
            rank, scale = config.rank_and_scale(module)
            outputs, inputs = sizes[module]
            for name, expected in ((first, (rank, inputs)), (second, (outputs, rank))):
                shape = tensors.entry(name).shape
                if shape != expected:
                    raise InvalidInput(
                        f"{folder / WEIGHTS}: tensor {quote_short(name)} has the shape {list(shape)}, expected "
                        f"{list(expected)}; is the adapter of this model?"
                    )
            a, b = _bounded(tensors, first, folder), _bounded(tensors, second, folder, scale)
            modules[module] = LowRank(a, b)
            for part in (module.encode(), a.tobytes(), modules[module].b.tobytes()):
                digest.update(len(part).to_bytes(8, "little") + part)
    return LoraAdapter(modules, max(len(part.a) for part in modules.values()), digest.hexdigest())


def _pairs(
    path: Path, tensors: TensorFolder, model: ModelSpec, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[str, str]]:
    """Return the names of lora_A and lora_B of every adapted module."""
    sides: dict[str, dict[str, str]] = {}
    for name in tensors.entries:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise Unsupported(f"{path}: tensor {quote_short(name)}: {_refusal_of(name)}")
        module = match["module"]
        if module not in sizes:
            if module in (model.head, f"{model.prefix}embed_tokens"):
                raise Unsupported(
                    f"{path}: adapts {module}; embedding and head cannot be adapted, only the linears of the layers"
                )
            raise InvalidInput(
                f"{path}: adapts {quote_short(module)}, which {model.name} does not have; is it of this model?"
            )
        sides.setdefault(module, {})[match["side"]] = name
    if not sides:
        raise InvalidInput(f"{path}: holds no tensors; train and save the adapter again")
    for module, names in sides.items():
        if len(names) < 2:
            raise InvalidInput(f"{path}: {module} has only one of lora_A and lora_B; is the file complete?")
    return {module: (names["A"], names["B"]) for module, names in sides.items()}


def _refusal_of(name: str) -> str:
    if "lora_embedding" in name:
        return "adapted embeddings are not supported; merge the adapter into the weights before quantising"
    if "lora_magnitude" in name:
        return _REFUSED["use_dora"]
    if name.endswith(".bias") or ".lora_bias" in name:
        return _REFUSED["lora_bias"]
    return "is not part of a LoRA in PEFT's format; merge it into the weights before quantising"


def _bounded(tensors: TensorFolder, name: str, folder: Path, scale: float = 1.0) -> Floats:
    """Return a tensor times `scale`. Raises `InvalidInput` for values with which a product could overflow."""
    import numpy as np

    values = tensors.floats(name)
    if not np.isfinite(values).all():
        raise InvalidInput(
            f"{folder / WEIGHTS}: tensor {quote_short(name)} holds NaN or infinity; train the adapter again"
        )
    most = float(np.abs(values).max(initial=0)) * max(1.0, abs(scale))
    if most > _MOST_VALUE:
        raise InvalidInput(
            f"{folder / WEIGHTS}: tensor {quote_short(name)} holds {most:.3g} (with the adapter's scale; at most"
            f" {_MOST_VALUE:,}); train the adapter again"
        )
    return values * values.dtype.type(scale)


class _AdapterConfig:
    """The checked content of `adapter_config.json`."""

    def __init__(self, place: Path, config: Mapping[str, Any]) -> None:
        self._place = place
        self._refuse(config)
        self._rank = self._whole(config.get("r"), "r")
        self._alpha = self._number(config.get("lora_alpha", 8), "lora_alpha")
        self._by_root = config.get("use_rslora") is True
        self._ranks = {key: self._whole(value, "rank_pattern") for key, value in self._pattern(config, "rank_pattern")}
        self._alphas = {
            key: self._number(value, "alpha_pattern") for key, value in self._pattern(config, "alpha_pattern")
        }
        targets = config.get("target_modules")
        self._targets: Sequence[str] | None = None  # None: an expression, which only PEFT reads
        if isinstance(targets, list) and all(isinstance(each, str) for each in targets):
            self._targets = targets
        elif targets is not None and not isinstance(targets, str):
            raise InvalidInput(
                f"{place}: target_modules: {quote_short(targets)} is neither a list of names nor an expression"
            )

    @property
    def most_rank(self) -> int:
        return max([self._rank, *self._ranks.values()])

    def check_targeted(self, module: str) -> None:
        """Refuse tensors of a module that is not targeted: PEFT would ignore them."""
        if self._targets is None or any(module == each or module.endswith(f".{each}") for each in self._targets):
            return
        raise InvalidInput(
            f"{self._place}: target_modules {quote_short(self._targets)} does not name {module}, which has tensors"
        )

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank of a module, and the scale of its product."""
        rank = _matching(self._ranks, module, self._rank)
        alpha = _matching(self._alphas, module, self._alpha)
        return int(rank), alpha / (math.sqrt(rank) if self._by_root else rank)

    def _refuse(self, config: Mapping[str, Any]) -> None:
        kind, task, bias = config.get("peft_type"), config.get("task_type"), config.get("bias", "none")
        if kind != "LORA":
            raise Unsupported(f"{self._place}: peft_type {quote_short(kind)}; only LORA adapters can be loaded")
        if task not in (None, "CAUSAL_LM"):
            raise Unsupported(f"{self._place}: task_type {quote_short(task)}; only CAUSAL_LM adapters can be loaded")
        if bias != "none":
            raise Unsupported(f"{self._place}: bias {quote_short(bias)}: {_REFUSED['lora_bias']}")
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_MOVED_BASES):
            raise Unsupported(
                f"{self._place}: init_lora_weights {quote_short(start)} changes the base too; convert the adapter "
                "when you save it (path_initial_model_for_weight_conversion)"
            )
        for name, value in config.items():
            if name in _HARMLESS or not value:
                continue
            reason = _REFUSED.get(name, "is not understood here; merge the adapter into the weights before quantising")
            raise Unsupported(f"{self._place}: {quote_short(name)} {quote_short(value)}: {reason}")

    def _pattern(self, config: Mapping[str, Any], field: str) -> Iterator[tuple[str, Any]]:
        patterns = config.get(field) or {}
        if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
            raise InvalidInput(f"{self._place}: {field}: {quote_short(patterns)} is not an object of module names")
        for key, value in patterns.items():
            # PEFT reads these as regular expressions, which untrusted input can make arbitrarily slow.
            if not _PLAIN.fullmatch(key.removeprefix("^")):
                raise Unsupported(f"{self._place}: {field} {quote_short(key)}: write module names, not expressions")
            yield key, value

    def _whole(self, value: Any, field: str) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise InvalidInput(
                f"{self._place}: {field}: must be a rank from 1 to {MAX_RANK}, found {quote_short(value)}"
            )
        return value

    def _number(self, value: Any, field: str) -> float:
        if type(value) not in (int, float) or not abs(value) <= 1e6:  # NaN is not, and any int can be compared
            raise InvalidInput(f"{self._place}: {field}: must be a finite number, found {quote_short(value)}")
        return float(value)


def _matching(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    """Return the value of the first pattern that matches the end of the module's name, or with `^` the whole name."""
    for key, value in patterns.items():
        if module == key.removeprefix("^") or module.endswith(f".{key}"):
            return value
    return otherwise
