"""Recipes: the storage formats of weights, as an ordered list of rules, pattern → format; the first match wins.

Packing, backends and devices are not part of a recipe.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, StringConstraints, model_validator

from edgekit.common.base import Frozen
from edgekit.common.bounds import Text
from edgekit.errors import InvalidInput, UnknownName, quote_short
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor

NumberFormat = Literal[
    "s3", "s4", "s8", "float32", "float16", "bfloat16", "mxfp4", "nvfp4", "affine3", "affine5", "affine6",
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "iq4_xs",
]  # fmt: skip
ScaleFormat = Literal["bfloat16", "float16", "float32"]

GROUPS = (128, 64, 32)
AS_IS = "as-is"  # the recipe of another tool's GGUF file, which is opened as it is
SMOOTH = "-smooth"  # suffix of the recipes that make channels alike
SMALL_MODEL = 300_000_000  # parameters
SMALL_BITS = 3.5  # a weight, at most, of the recipe `small`
INTEGER_BITS = {"s3": 3, "s4": 4, "s8": 8}
_FLOAT_BITS = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0}
_NATIVE_GROUPS: tuple[tuple[NumberFormat, int], ...] = (("nvfp4", 16), ("mxfp4", 32))
# Bits of the integers, and bits of scale (and bias) that each group adds. The affine ones are of older artifacts.
_NATIVE = {"mxfp4": (4, 8), "nvfp4": (4, 8), "affine3": (3, 32), "affine5": (5, 32), "affine6": (6, 32)}
# llama.cpp's own: the values of a block and its bytes, scales included.
GGUF_BLOCKS: dict[str, tuple[int, int]] = {
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210), "q4_0": (32, 18),
    "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "iq4_nl": (32, 18), "iq4_xs": (256, 136),
}  # fmt: skip
# llama.cpp's choice for rows whose length is not a multiple of the block.
_GGUF_NARROW: dict[str, NumberFormat] = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


class Format(Frozen):
    """The format of one tensor.

    `group` is the number of input values that share a scale; None: one scale per row. `scales` is the type of scales
    from another tool, which may have any finite value of either sign. None: edgekit's own, positive bfloat16. With
    `minima`, integers are unsigned, and each group adds the value of its integer 0, of the same type as its scale.
    """

    kind: NumberFormat
    group: Annotated[int, Field(ge=1, le=4096)] | None = None
    scales: Annotated[ScaleFormat | None, Field(exclude_if=lambda value: value is None)] = None
    minima: Annotated[bool, Field(exclude_if=lambda value: not value)] = False

    @model_validator(mode="after")
    def _group_belongs(self) -> Format:
        if self.has_few_bits and self.group not in GROUPS:
            raise ValueError(f"{self.kind} needs a group of 32, 64 or 128")
        if self.kind == "s8" and self.group not in (None, *GROUPS):
            raise ValueError("s8 takes a group of 32, 64 or 128, or none")
        if self.is_float and self.group is not None:
            raise ValueError(f"{self.kind} takes no group")
        if self.scales is not None and self.kind not in ("s4", "s8"):
            raise ValueError(f"{self.kind} takes no type of scales")
        if self.minima and (self.scales is None or self.group is None):
            raise ValueError("minima belong to groups of integers whose scales have a type")
        return self

    @property
    def is_float(self) -> bool:
        return self.kind in _FLOAT_BITS

    @property
    def has_few_bits(self) -> bool:
        """True for integers of which rounding to the nearest loses much."""
        return INTEGER_BITS.get(self.kind, 8) < 8

    @property
    def is_native(self) -> bool:
        """True for a vendor's format: quantised by the vendor from the float model, not packed from neutral weights."""
        return self.kind in _NATIVE or self.kind in GGUF_BLOCKS

    def fitted(self, inputs: int) -> Format:
        """Return this format for rows of `inputs` values: a smaller group if this one does not divide, else s8."""
        if self.kind in _GGUF_NARROW and inputs % GGUF_BLOCKS[self.kind][0]:
            return Format(kind=_GGUF_NARROW[self.kind])
        if self.is_native or self.group is None or inputs % self.group == 0:
            return self
        for group in GROUPS:
            if group < self.group and inputs % group == 0:
                return self.model_copy(update={"group": group})
        return Format(kind="s8")

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Return the neutral bytes of a tensor: integers and scales, or floats."""
        inputs = shape[-1]
        rows = 1
        for size in shape[:-1]:
            rows *= size
        if self.is_float:
            return rows * inputs * int(_FLOAT_BITS[self.kind]) // 8
        if self.kind in _NATIVE:
            bits, scale_bits = _NATIVE[self.kind]
            return rows * (inputs * bits + -(-inputs // (self.group or 32)) * scale_bits) // 8
        if self.kind in GGUF_BLOCKS:
            values, size = GGUF_BLOCKS[self.kind]
            return rows * -(-inputs // values) * size
        scales = inputs // (self.group or inputs) * (4 if self.scales == "float32" else 2) * (1 + self.minima)
        return rows * (scales + (-(-inputs * INTEGER_BITS[self.kind] // 32) * 4 if self.has_few_bits else inputs))

    def __str__(self) -> str:
        return (f"{self.kind}-g{self.group}" if self.group else self.kind) + " with minima" * self.minima


class Rule(Frozen):
    """Modules whose name matches `pattern` (shell wildcards, e.g. `*.down_proj`) are stored as `format`."""

    pattern: Annotated[str, StringConstraints(max_length=512)]
    format: Format


class RulesByName(NamedTuple):
    """Rules, with the index of the first one for every name or end of names, and index and pattern of the others."""

    rules: tuple[Rule, ...]
    names: dict[str, int]  # an end of names begins with a star
    sizes: frozenset[int]  # of the ends
    patterns: tuple[tuple[int, str], ...]


_WILDCARDS = frozenset("*?[")
_NUMBER = re.compile(r"\d+")
_NUMBERED = re.compile(r"[\d?[]")  # in a pattern that may match one layer or expert and not another
_KEPT_RECIPES = 16
# By the id of their rules, which they hold. To hash rules takes longer than to match them.
_divided: dict[int, RulesByName] = {}


class Recipe(Frozen):
    """An ordered list of rules; the first match wins. Norms, biases and routers are never quantised.

    >>> eight, four = Format(kind="s8"), Format(kind="s4", group=32)
    >>> rules = (Rule(pattern="*.down_proj", format=eight), Rule(pattern="*", format=four))
    >>> edgekit.quantize("demo", Recipe(name="own", rules=rules), "demo-own")
    """

    name: Text
    rules: Annotated[tuple[Rule, ...], Field(max_length=100_000)]
    float_format: Format = Format(kind="float16")  # of tensors that no rule matches or that are never quantised
    # A budget for the whole model, or for the layers' linears only. Within it, sensitive linears are promoted to s8.
    bits_per_weight: Annotated[float, Field(gt=0, le=64, allow_inf_nan=False)] | None = None
    linear_bits_per_weight: Annotated[float, Field(gt=0, le=64, allow_inf_nan=False)] | None = None
    # The same for models below SMALL_MODEL, which lose most. None: as for others.
    small_model_linear_bits: Annotated[
        float | None, Field(gt=0, le=64, allow_inf_nan=False, exclude_if=lambda value: value is None)
    ] = None
    # Channels are made alike before weights are rounded, for engines that round inputs to 8 bits a token.
    smooth: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    # Description of the source's integers, if they are kept: "Q4_0, groups of 32". None: the model is quantised anew.
    keeps: Annotated[Text | None, Field(exclude_if=lambda value: value is None)] = None

    def __hash__(self) -> int:
        return hash((self.name, len(self.rules)))  # cheap, as a model's

    @property
    def plain_name(self) -> str:
        """The name of the same formats without smoothing."""
        return self.name.removesuffix(SMOOTH) if self.smooth else self.name

    def format_of(self, tensor: Tensor) -> Format:
        """Return the format of one tensor, fitted to its shape."""
        if tensor.role in ("norm", "bias", "router", "other") or len(tensor.shape) < 2:
            return self.float_format
        found = _format_for(self.rules, tensor.module)
        return self.float_format if found is None else found.fitted(tensor.shape[-1])

    @property
    def has_few_bits(self) -> bool:
        """True if rounding to the nearest loses much in a matrix."""
        return any(rule.format.has_few_bits for rule in self.rules)

    @property
    def has_minima(self) -> bool:
        """True if groups of kept integers add a minimum."""
        return any(rule.format.minima for rule in self.rules)

    def is_exact(self) -> bool:
        """Return True if nothing is quantised."""
        return all(rule.format.is_float for rule in self.rules)

    def is_native(self) -> bool:
        """Return True if a rule uses a vendor's format."""
        return any(rule.format.is_native for rule in self.rules)

    def is_rare(self) -> bool:
        """Return True for formats that few engines have, which plans take only by name: a vendor's, or 3 bits."""
        return any(rule.format.is_native or rule.format.kind == "s3" for rule in self.rules)


def _by_name(rules: tuple[Rule, ...]) -> RulesByName:
    """Divide rules by their patterns.

    A recipe has a rule for each promoted module, or for each layer, so matching every module with every rule takes
    a tenth of a second, and ten seconds for a thousand layers.
    """
    known = _divided.get(id(rules))
    if known is not None and known.rules is rules:
        return known
    is_name = [_WILDCARDS.isdisjoint(rule.pattern.removeprefix("*")) for rule in rules]
    names = {rules[place].pattern: place for place in reversed(range(len(rules))) if is_name[place]}
    sizes = frozenset(len(name) for name in names if name.startswith("*"))
    patterns = tuple((place, rule.pattern) for place, rule in enumerate(rules) if not is_name[place])
    found = RulesByName(rules, names, sizes, patterns)
    if len(_divided) >= _KEPT_RECIPES:
        _divided.clear()
    _divided[id(rules)] = found
    return found


def _format_for(rules: tuple[Rule, ...], module: str) -> Format | None:
    """Return the format of the first rule that matches; None if there is none."""
    _, names, sizes, patterns = _by_name(rules)
    ends = (f"*{module[len(module) + 1 - size :]}" for size in sizes if size <= len(module) + 1)
    named = min(names.get(each, len(rules)) for each in (module, *ends))
    matching = (place for place, pattern in patterns if place < named and fnmatchcase(module, pattern))
    place = next(matching, named)
    return rules[place].format if place < len(rules) else None


def has_float_embedding(recipe: Recipe, model: ModelSpec) -> bool:
    """Whether embedding and head stay in float, as servers need them."""
    return all(recipe.format_of(tensor).is_float for tensor in model.tensors() if tensor.role in ("embedding", "head"))


class Alike(NamedTuple):
    """Tensors of one role, shape and format: the first of them, and their number."""

    tensor: Tensor
    format: Format
    number: int


@lru_cache(maxsize=256)
def tensors_alike(model: ModelSpec, recipe: Recipe) -> tuple[Alike, ...]:
    """Return all tensors under a recipe, those that are alike together: a planner sums over them many times."""
    by_number = any(_NUMBERED.search(rule.pattern) for rule in recipe.rules)
    found: dict[tuple[str, bool, tuple[int, ...], Format], Alike] = {}
    for tensor, number in ((each, 1) for each in model.tensors()) if by_number else _names_alike(model):
        key = (tensor.role, tensor.is_of_expert, tensor.shape, recipe.format_of(tensor))
        first = found.get(key, Alike(tensor, key[-1], 0))
        found[key] = first._replace(number=first.number + number)
    return tuple(found.values())


@lru_cache(maxsize=64)
def _names_alike(model: ModelSpec) -> tuple[tuple[Tensor, int], ...]:
    """Return the first of the tensors whose shapes and names differ only in numbers, and how many there are."""
    found: dict[tuple[str, bool, tuple[int, ...], str], tuple[Tensor, int]] = {}
    for tensor in model.tensors():
        key = (tensor.role, tensor.is_of_expert, tensor.shape, _NUMBER.sub("", tensor.name))
        first, number = found.get(key, (tensor, 0))
        found[key] = first, number + 1
    return tuple(found.values())


def weight_bytes(model: ModelSpec, recipe: Recipe) -> int:
    """Return the bytes of the neutral weights of `model` under `recipe`."""
    return sum(each.number * each.format.bytes(each.tensor.shape) for each in tensors_alike(model, recipe))


def bits_per_weight(model: ModelSpec, recipe: Recipe) -> float:
    """Return the stored bits per parameter, embedding and head included."""
    return weight_bytes(model, recipe) * 8 / model.parameters


def of_model(recipe: Recipe, model: ModelSpec) -> Recipe:
    """Return `balanced`, with any budget, with four bits for an embedding that the head does not share.

    Rows that are only looked up lose little: a KL of 0.008 on SmolLM2. The same matrix as the head loses 0.15, or 0.016
    by GPTQ; so within a budget of all weights it gets four bits too, unless its eight are worth their bytes.
    `small` gets four for the head and groups of 128, where that makes at most 3.5 bits a weight. Other recipes, and
    models, are returned as they are.
    """
    if recipe == SMALL:
        head = "*embed_tokens*" if model.tied else model.head
        finer = (Rule(pattern=head, format=Format(kind="s4", group=128)), *_all("s3", 128))
        taken = SMALL.model_copy(update={"rules": finer})
        return taken if bits_per_weight(model, taken) <= SMALL_BITS else SMALL
    is_budgeted = recipe.rules == RECIPES["balanced"].rules and budget_bytes(recipe, model) is not None
    is_whole = recipe.bits_per_weight is not None
    if model.encoder or not is_budgeted or (model.tied and not is_whole):
        return recipe
    tables = [f"{model.prefix}embed_tokens", *([model.head] if is_whole and not model.tied else [])]
    coarse = [Rule(pattern=table, format=Format(kind="s4", group=32)) for table in tables]
    return recipe.model_copy(update={"rules": (*coarse, *recipe.rules)})


def with_budget(recipe: Recipe, model: ModelSpec, bits: float) -> Recipe:
    """Return `recipe` with a budget of `bits` per weight of `model`, all weights included. Raises `InvalidInput`."""
    budgeted = recipe.model_copy(update={"name": f"{recipe.name}-to-{bits:g}", "bits_per_weight": bits})
    least = bits_per_weight(model, of_model(budgeted, model))
    if not least <= bits <= 32:
        raise InvalidInput(
            f"bits_per_weight {bits:g}: {model.name} in {recipe.name} needs at least {least:.2f}; "
            "give more, or a recipe with larger groups"
        )
    return budgeted


@lru_cache(maxsize=256)
def budget_bytes(recipe: Recipe, model: ModelSpec) -> int | None:
    """Return the budget of all weights in bytes; None if the recipe has none."""
    if recipe.bits_per_weight is not None:
        return int(model.parameters * recipe.bits_per_weight / 8)
    if recipe.linear_bits_per_weight is None:
        return None
    is_small = model.parameters < SMALL_MODEL
    bits = (recipe.small_model_linear_bits if is_small else None) or recipe.linear_bits_per_weight
    linears = [each for each in tensors_alike(model, recipe) if each.tensor.role == "linear"]
    rest = weight_bytes(model, recipe) - sum(each.number * each.format.bytes(each.tensor.shape) for each in linears)
    return rest + int(sum(each.number * each.tensor.size for each in linears) * bits / 8)


def needs_text(recipe: Recipe, model: ModelSpec) -> bool:
    """Return whether the model is run on text to spend the recipe's budget or to smooth, whatever chooses integers."""
    return recipe.smooth or budget_bytes(recipe, model) is not None


def _s4(group: int) -> tuple[Rule, ...]:
    # The embedding and the head keep 8 bits: they cost little on large models and hurt most at four.
    return (
        Rule(pattern="*embed_tokens*", format=Format(kind="s8")),
        Rule(pattern="lm_head", format=Format(kind="s8")),
        Rule(pattern="*", format=Format(kind="s4", group=group)),
    )


def _all(kind: NumberFormat, group: int | None = None) -> tuple[Rule, ...]:
    return (Rule(pattern="*", format=Format(kind=kind, group=group)),)


_LLAMA_CPP = re.compile(r"(?:i?q|tq)[1-8]_\w{1,8}", re.IGNORECASE | re.ASCII)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="balanced", rules=_s4(32), linear_bits_per_weight=5.0, small_model_linear_bits=5.5),
        Recipe(name="s4-g32", rules=_s4(32)),
        Recipe(name="s4-g64", rules=_s4(64)),
        Recipe(name="s4-g128", rules=_s4(128)),
        Recipe(name="mixed-4.5", rules=_s4(128), bits_per_weight=4.5),
        Recipe(name="s8", rules=_all("s8")),
        Recipe(name="float16", rules=_all("float16")),
        Recipe(name="float32", rules=_all("float32"), float_format=Format(kind="float32")),
    )
}


# For devices that cannot hold 4 bits, as mlx packs it; llamacpp has other rules (`gguf_mixtures`).
SMALL = Recipe(name="small", rules=_all("s3", 64))

# Placeholder for the recipe of a quantised source, which depends on its files (edgekit.quant.own_integers).
KEEP = Recipe(name="keep", rules=(), keeps="the source's own integers")

# Vendors' formats are not packed from neutral weights, so they are used only if a request names them.
NATIVE_RECIPES: dict[str, Recipe] = {kind: Recipe(name=kind, rules=_all(kind, group)) for kind, group in _NATIVE_GROUPS}

# llama.cpp's mixtures, with the format of most matrices; `edgekit.quant.gguf_mixtures` adds the rules of a model's
# layers.
GGUF_RECIPES: dict[str, Recipe] = {
    "gguf-q4_k_m": Recipe(name="gguf-q4_k_m", rules=_all("q4_k")),
    "gguf-q5_k_m": Recipe(name="gguf-q5_k_m", rules=_all("q5_k")),
    "gguf-q6_k": Recipe(name="gguf-q6_k", rules=_all("q6_k")),
}


def smooth(recipe: Recipe) -> Recipe:
    """Return a recipe whose weights lose less on engines that round inputs to 8 bits a token."""
    return recipe.model_copy(update={"name": f"{recipe.name}{SMOOTH}", "smooth": True})


_NAMED: dict[str, Recipe] = {
    **RECIPES,
    **{f"{name}{SMOOTH}": smooth(base) for name, base in RECIPES.items() if not base.is_exact()},
    **NATIVE_RECIPES,
    **GGUF_RECIPES,
    **{each.name: each for each in (SMALL, KEEP)},
}


def named_recipe(name: str) -> Recipe:
    """Return a built-in recipe, `KEEP` or a vendor's own format. Raises `UnknownName`."""
    recipe = _NAMED.get(name)
    if recipe is None and _LLAMA_CPP.fullmatch(name):
        nearest = "s8" if name.lower().startswith("q8") else "s4-g32"
        own = f"gguf-{name.lower()}"
        by_name = f", and --target llamacpp has its own as {own}" if own in GGUF_RECIPES else ""
        raise InvalidInput(f"recipe {quote_short(name)} is llama.cpp's; the nearest one here is {nearest}{by_name}")
    if recipe is None:
        raise UnknownName("recipe", name, _NAMED)
    return recipe
