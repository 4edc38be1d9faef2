"""Keeps the integers of an already quantised source bit for bit: their recipe, and the method that copies them.

Float tensors of the source are kept too; other types (Q6_K, Q5_K) are dequantised and rounded to s8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from edgekit.contracts.neutral import is_module
from edgekit.contracts.recipe import AS_IS, GGUF_BLOCKS, KEEP, Format, NumberFormat, Recipe, Rule, ScaleFormat
from edgekit.errors import InvalidInput
from edgekit.formats.expert_stacks import ExpertStacks
from edgekit.formats.int_packing import IntegerFormat, IntegerRows
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.source import ModelSource, SourceMatrix
from edgekit.model.spec import ModelSpec
from edgekit.quant.shards import QuantizedPart, ReadRows, WeightPart

if TYPE_CHECKING:
    from edgekit.model.source import SourceTensors

_FLOATS: dict[str, NumberFormat] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float32"}
_SCALES: dict[str, ScaleFormat] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_ROUNDED = Format(kind="s8")
_SHOWN = 3


class OwnIntegers(NamedTuple):
    """The recipe that keeps a source's integers, and notes on the matrices that it rounds."""

    recipe: Recipe
    notes: tuple[str, ...]


def own_integers(source: ModelSource) -> OwnIntegers | None:
    """Return the recipe of a source's own integers; None unless most values of its linears are integers."""
    matrices = source.matrices
    linears = [tensor for tensor in source.spec.tensors() if tensor.is_linear and tensor.name in matrices]
    kept = sum(tensor.size for tensor in linears if matrices[tensor.name].integers is not None)
    if not linears or 2 * kept <= sum(tensor.size for tensor in linears):
        return None
    modules = [tensor for tensor in source.spec.tensors() if is_module(tensor)]
    formats = {tensor.module: _format_of(matrices[tensor.name]) for tensor in modules}
    common = Counter(formats[tensor.module] for tensor in linears).most_common(1)[0][0]
    others = (
        Rule(pattern=tensor.module, format=formats[tensor.module])
        for tensor in modules
        if not tensor.is_linear or formats[tensor.module] != common
    )
    recipe = Recipe(
        name=KEEP.name,
        rules=(*others, Rule(pattern="*", format=common)),
        float_format=Format(kind=common.scales or "float16"),
        keeps=_in_words([matrices[tensor.name] for tensor in modules]),
    )
    return OwnIntegers(recipe, rounded_notes(source.spec, recipe, {name: m.type for name, m in matrices.items()}))


def as_is(source: ModelSource) -> Recipe | None:
    """Return the recipe of a GGUF file as it is, every matrix in its own type; None if it has types without a name."""
    kinds = {name: _FLOATS.get(matrix.type, matrix.type.lower()) for name, matrix in source.matrices.items()}
    if not set(kinds.values()) <= {"float32", "float16", "bfloat16", *GGUF_BLOCKS}:
        return None
    modules = [tensor for tensor in source.spec.tensors() if tensor.name in kinds]
    rules = tuple(
        Rule(pattern=tensor.module, format=Format(kind=cast("NumberFormat", kinds[tensor.name]))) for tensor in modules
    )
    return Recipe(name=AS_IS, rules=rules, keeps=source.quantised_as or "float")


def recipe_of(source: ModelSource, given: Recipe | None) -> Recipe | None:
    """Return the recipe to use: the recipe of the source's own integers if `given` is `keep` or None, else `given`."""
    if given is not None and given.name != KEEP.name:
        return given
    own = own_integers(source)
    if own is None and given is not None:
        raise InvalidInput(
            f"recipe {KEEP.name}: {source.given} is {source.quantised_as or 'float'}, which has no integers to keep; "
            "leave out --recipe, or choose one such as balanced"
        )
    return own.recipe if own else None


def rounded_notes(model: ModelSpec, recipe: Recipe, types: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note for each source type whose matrices a recipe that keeps integers has to round."""
    by_type: dict[str, list[str]] = {}
    for tensor in model.tensors():
        if is_module(tensor) and recipe.format_of(tensor) == _ROUNDED and types[tensor.name] not in _FLOATS:
            by_type.setdefault(types[tensor.name], []).append(tensor.module)
    return tuple(
        f"{', '.join(modules[:_SHOWN])}{' and more' if len(modules) > _SHOWN else ''}: stored as {name}, which is "
        f"dequantised and rounded to {_ROUNDED}"
        for name, modules in by_type.items()
    )


def _format_of(matrix: SourceMatrix) -> Format:
    if matrix.integers is not None:
        bits, group, scales, minima = matrix.integers
        return Format(kind="s4" if bits == 4 else "s8", group=group, scales=_SCALES[scales], minima=minima)
    return Format(kind=_FLOATS[matrix.type]) if matrix.type in _FLOATS else _ROUNDED


def _in_words(matrices: list[SourceMatrix]) -> str:
    """Name the integers that are kept, most values first: `Q4_0, groups of 32`."""
    values: Counter[tuple[str, IntegerFormat]] = Counter()
    for matrix in matrices:
        if matrix.integers is not None:
            values[matrix.type, matrix.integers] += matrix.values
    return "; ".join(
        f"{name}, {f'groups of {held.group}' if held.group else 'a scale for each row'}"
        for (name, held), _ in values.most_common()
    )


class Kept:
    """The method that copies a source's own integers and scales, and rounds its other modules to nearest."""

    def __init__(self, tensors: SourceTensors, read: ReadRows, recipe: Recipe) -> None:
        self._tensors, self._read, self._recipe = tensors, read, recipe

    def choose(self, part: WeightPart) -> QuantizedPart:
        return QuantizedPart(self._read, {}, {}, kept=dict(self._kept(part)))

    def advance(self, part: WeightPart, shard: Path) -> None:
        pass

    def _kept(self, part: WeightPart) -> Iterator[tuple[str, Callable[[slice], IntegerRows]]]:
        for tensor in part.tensors:
            stored = self._recipe.format_of(tensor)
            if stored.scales is None:
                continue
            has = self._tensors.integer_formats.get(tensor.name)
            if has is None or _format_of(SourceMatrix("", tensor.size, has)) != stored:
                raise InvalidInput(
                    f"{tensor.name}: the recipe keeps {stored}, and the file has {has or 'no integers'}; plan again"
                )
            yield tensor.module, partial(self._rows, tensor.name)

    def _rows(self, name: str, rows: slice) -> IntegerRows:
        assert not isinstance(self._tensors, TensorFolder | ExpertStacks), "floats have no integers"
        return self._tensors.integers(name, rows)
