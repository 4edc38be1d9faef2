"""How weights are stored: an ordered list of rules, pattern → format; the first match wins.

It knows nothing of packing, backends or devices.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

from pydantic import model_validator

from edgekit.errors import UnknownName
from edgekit.frozen import Frozen
from edgekit.model import ModelSpec, Tensor

Kind = Literal["s4", "s8", "float32", "float16", "bfloat16", "mxfp4", "nvfp4", "affine3", "affine5", "affine6"]

GROUPS = (128, 64, 32)
_FLOAT_BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0}
# Bits of the integers, and bits of scale (and bias) that each group adds.
_NATIVE_GROUPS: tuple[tuple[Kind, int], ...] = (
    ("affine6", 64),
    ("affine5", 64),
    ("nvfp4", 16),
    ("mxfp4", 32),
    ("affine3", 64),
)
_NATIVE = {"mxfp4": (4, 8), "nvfp4": (4, 8), "affine3": (3, 32), "affine5": (5, 32), "affine6": (6, 32)}


class Format(Frozen):
    """How one tensor is stored. `group` counts values along the input that share a scale; None: one scale a row."""

    kind: Kind
    group: int | None = None

    @model_validator(mode="after")
    def _group_belongs(self) -> Format:
        if self.kind == "s4" and self.group not in GROUPS:
            raise ValueError("s4 needs a group of 32, 64 or 128")
        if (self.is_float or self.kind == "s8") and self.group is not None:
            raise ValueError(f"{self.kind} takes no group")
        return self

    @property
    def is_float(self) -> bool:
        return self.kind in _FLOAT_BITS

    @property
    def is_native(self) -> bool:
        """A vendor's own format, quantised from the float model: it leaves the common weights."""
        return self.kind in _NATIVE

    def fitted(self, inputs: int) -> Format:
        """This format for rows of `inputs` values: the next smaller group where this one does not divide, else s8."""
        if self.kind != "s4":
            return self
        for group in GROUPS:
            if self.group is not None and group <= self.group and inputs % group == 0:
                return Format(kind="s4", group=group)
        return Format(kind="s8")

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Neutral bytes of a tensor: integers and bf16 scales, or floats."""
        inputs = shape[-1]
        rows = 1
        for size in shape[:-1]:
            rows *= size
        if self.is_float:
            return rows * inputs * int(_FLOAT_BITS[self.kind]) // 8
        if self.kind in _NATIVE:
            bits, scale_bits = _NATIVE[self.kind]
            return rows * (inputs * bits + -(-inputs // (self.group or 32)) * scale_bits) // 8
        if self.kind == "s8":
            return rows * (inputs + 2)
        assert self.group is not None
        return rows * (-(-inputs * 4 // 32) * 4 + inputs // self.group * 2)

    def __str__(self) -> str:
        return f"{self.kind}-g{self.group}" if self.group else self.kind


class Rule(Frozen):
    """Modules whose name matches `pattern` (shell wildcards, e.g. `*.down_proj`) are stored as `format`."""

    pattern: str
    format: Format


class Recipe(Frozen):
    """An ordered list of rules. Norms, biases and routers are never quantised."""

    name: str
    rules: tuple[Rule, ...]
    float_format: Format = Format(kind="float16")  # what no rule matches, and what is never quantised
    bits_per_weight: float | None = None  # a budget: sensitivity picks which linears climb to s8

    def format_of(self, tensor: Tensor) -> Format:
        """The format of one tensor, fitted to its shape."""
        if tensor.role in ("norm", "bias", "router", "other") or len(tensor.shape) < 2:
            return self.float_format
        for rule in self.rules:
            if fnmatchcase(tensor.module, rule.pattern):
                return rule.format.fitted(tensor.shape[-1])
        return self.float_format

    def is_exact(self) -> bool:
        """Whether nothing is quantised."""
        return all(rule.format.is_float for rule in self.rules)

    def is_native(self) -> bool:
        return any(rule.format.is_native for rule in self.rules)


def weight_bytes(model: ModelSpec, recipe: Recipe) -> int:
    """Bytes of the neutral weights of `model` under `recipe`."""
    return sum(recipe.format_of(tensor).bytes(tensor.shape) for tensor in model.tensors())


def bits_per_weight(model: ModelSpec, recipe: Recipe) -> float:
    """Stored bits per parameter, embedding and head counted."""
    return weight_bytes(model, recipe) * 8 / model.parameters


def _s4(group: int) -> tuple[Rule, ...]:
    # The embedding and the head keep 8 bits: they cost little on large models and hurt most at four.
    return (
        Rule(pattern="*embed_tokens*", format=Format(kind="s8")),
        Rule(pattern="lm_head", format=Format(kind="s8")),
        Rule(pattern="*", format=Format(kind="s4", group=group)),
    )


def _all(kind: Kind) -> tuple[Rule, ...]:
    return (Rule(pattern="*", format=Format(kind=kind)),)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="s4-g32", rules=_s4(32)),
        Recipe(name="s4-g64", rules=_s4(64)),
        Recipe(name="s4-g128", rules=_s4(128)),
        Recipe(name="mixed-4.5", rules=_s4(128), bits_per_weight=4.5),
        Recipe(name="s8", rules=_all("s8")),
        Recipe(name="float16", rules=_all("float16")),
        Recipe(name="float32", rules=_all("float32"), float_format=Format(kind="float32")),
    )
}


# Vendors' own formats leave the common weights, so they are taken only by those who ask for them by name.
NATIVE_RECIPES: dict[str, Recipe] = {
    kind: Recipe(name=kind, rules=(Rule(pattern="*", format=Format(kind=kind, group=group)),))
    for kind, group in _NATIVE_GROUPS
}


def named_recipe(name: str) -> Recipe:
    """A built-in recipe, or a vendor's own format."""
    found = RECIPES.get(name) or NATIVE_RECIPES.get(name)
    if found is None:
        raise UnknownName("recipe", name, [*RECIPES, *NATIVE_RECIPES, "a YAML file of rules"])
    return found
