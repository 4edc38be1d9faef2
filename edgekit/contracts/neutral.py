"""Neutral weights: the quantised model, one set of integers and scales that every target packs.

A folder of safetensors in the compressed-tensors `pack-quantized` layout with the model's config, tokenizer and chat
template, and a manifest.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.bounds import Amount, Count, FileBytes, FileName, Sha256, Text, Version
from edgekit.common.content_store import ContentStore, bounded_store
from edgekit.common.files import file_sha256
from edgekit.common.parsing import read_bytes
from edgekit.common.sealed_json import read_sealed_json
from edgekit.common.staging import copy_folder
from edgekit.contracts.plan import Method, Quantisation
from edgekit.contracts.recipe import INTEGER_BITS, Format, Recipe
from edgekit.errors import DamagedArtifact, EdgekitError, InvalidInput, quote_short
from edgekit.formats.int_packing import IntegerRows, in_slices, row_bytes, unpack, unpack_unsigned
from edgekit.formats.safetensors import TensorBytes, TensorFolder
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

MANIFEST = "edgekit.json"  # the file that makes a folder one of neutral weights
# 1: without a seal. 2: every scale is positive bfloat16. 3: integers of other tools, with scales of either sign.
# 4: the same, of which some have minima.
MANIFEST_VERSION = 4
MIN_SCALE = 2.0**-17  # the smallest scale that fp16 holds with all of bfloat16's bits
MAX_SCALE = 65280.0  # the largest bfloat16 that fp16 holds
MINIMA_WITHIN = 1 / 64  # of the step between two integers: by so much a target may round what groups add
FLOAT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_SCALE_DTYPES = {None: "BF16"} | FLOAT_DTYPES
_MAX_MANIFEST_BYTES = 64 << 20


class WeightFile(Frozen):
    """Size and hash of one file of the folder."""

    bytes: FileBytes
    sha256: Sha256


class CalibrationFact(Frozen):
    """The calibration text of the integers."""

    sha256: Sha256
    description: Text
    sequences: Count
    tokens: Count


class Statistics(Frozen):
    """The rounding error of a module's stored weights."""

    weight_error: Amount  # squared error over squared weights
    output_error: Amount | None = None  # the same for its outputs on the calibration text


class NeutralManifest(Frozen):
    """The model, recipe, origin and files of neutral weights."""

    version: Version = MANIFEST_VERSION
    model: ModelSpec
    recipe: Recipe  # resolved: every module's format follows from it
    method: Method
    rescales: bool = Field(False, exclude_if=lambda value: not value)  # the method scaled inputs of linears
    source_files: dict[Text, Sha256]
    calibration: CalibrationFact | None = None
    tools: dict[Text, Text]  # package → version
    files: Annotated[dict[FileName, WeightFile], Field(max_length=100_000)]
    statistics: dict[Text, Statistics]  # by module
    notes: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()

    @property
    def quantisation(self) -> Quantisation:
        """The method as plans name it."""
        text = self.calibration.description if self.calibration else None
        return Quantisation(method=self.method, calibration=text, rescales=self.rescales)

    @property
    def weights_sha256(self) -> str:
        """The hash of all integers, scales and floats."""
        lines = [
            f"{name} {file.sha256}\n" for name, file in sorted(self.files.items()) if name.endswith(".safetensors")
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


class StoredTensor(NamedTuple):
    """Name, type and shape of a stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def on_disk(model: ModelSpec, name: str) -> str:
    """Return the name of a tensor in the folder: `model.…` and `lm_head`, as in a plain text model.

    In the spec, the text part of a multimodal model keeps its original names.
    """
    if name.startswith(f"{model.head}."):
        return "lm_head" + name.removeprefix(model.head)
    return "model." + name.removeprefix(model.prefix) if name.startswith(model.prefix) else name


def stored_as(tensor: Tensor, stored: Format) -> list[StoredTensor]:
    """Return the stored tensors of one tensor of the model, by the model's names."""
    if stored.is_float:
        return [StoredTensor(tensor.name, FLOAT_DTYPES[stored.kind], tensor.shape)]
    assert len(tensor.shape) == 2 and not stored.is_native, (tensor, stored)
    outputs, inputs = tensor.shape
    dtype, groups = _SCALE_DTYPES[stored.scales], (outputs, inputs // (stored.group or inputs))
    words = row_bytes(inputs, bits_of(stored)) // 4
    return [
        StoredTensor(f"{tensor.module}.weight_packed", "I32", (outputs, words)),
        StoredTensor(f"{tensor.module}.weight_scale", dtype, groups),
        *([StoredTensor(f"{tensor.module}.weight_minimum", dtype, groups)] if stored.minima else []),
        StoredTensor(f"{tensor.module}.weight_shape", "I64", (2,)),
    ]


def bits_of(stored: Format) -> int:
    """Return the bits of one stored integer."""
    return INTEGER_BITS[stored.kind]


class NeutralWeights:
    """Opened neutral weights, returned by `quantize`; every tensor is present and has its shape.

    >>> weights = NeutralWeights.open("demo-s4", verify=True)
    >>> module = weights.modules()[0]
    >>> weights.integers(module).shape, weights.scales(module).shape
    """

    def __init__(self, folder: Path, manifest: NeutralManifest, tensors: TensorFolder) -> None:
        self.folder = folder
        self.manifest = manifest
        self.sha256 = manifest.weights_sha256
        self._tensors = tensors
        self._modules = {tensor.module: tensor for tensor in manifest.model.tensors() if is_module(tensor)}
        self._checked: set[str] = set()

    @staticmethod
    def open(folder: str | Path, *, verify: bool = False) -> NeutralWeights:
        """Open the weights in `folder`; with `verify`, check every byte and every scale too. Raises `InvalidInput`."""
        place = Path(folder)
        manifest = read_manifest(place)
        for name, file in manifest.files.items():
            path = place / name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise DamagedArtifact(
                    f"{place}: {quote_short(name)} is missing or does not have its {file.bytes:,} bytes; quantise again"
                )
        tensors = TensorFolder.open(place)
        _check_tensors(place, manifest, tensors)
        weights = NeutralWeights(place, manifest, tensors)
        if verify:
            weights.verify()
        return weights

    @property
    def model(self) -> ModelSpec:
        return self.manifest.model

    @property
    def recipe(self) -> Recipe:
        return self.manifest.recipe

    def modules(self) -> list[str]:
        """Return every module with a weight matrix, in the order of the model."""
        return list(self._modules)

    def tensor_of(self, module: str) -> Tensor:
        """Return the model's matrix of a module. Raises `InvalidInput` for an unknown module."""
        try:
            return self._modules[module]
        except KeyError:
            raise InvalidInput(
                f"{self.folder}: no module {quote_short(module)}; `edgekit inspect` lists them"
            ) from None

    def format_of(self, module: str) -> Format:
        """Return the format of a module's matrix."""
        return self.recipe.format_of(self.tensor_of(module))

    def packed(self, module: str) -> NDArray[np.uint8]:
        """Return the bytes of `weight_packed`: [out, in/2] for s4 (value + 8, low nibble first), [out, in] for s8."""
        tensor, bits = self._quantised(module)
        outputs, inputs = tensor.shape
        stored = self._array(f"{module}.weight_packed").view(np.uint8)
        return stored.reshape(outputs, row_bytes(inputs, bits))[:, : -(-inputs * bits // 8)]

    def integers(self, module: str, rows: slice | None = None) -> NDArray[np.int8]:
        """Return the integers, [out, in], in [-8, 7] or [-128, 127]."""
        tensor, bits = self._quantised(module)
        packed = self.packed(module)
        return unpack(packed if rows is None else packed[rows], bits, tensor.shape[1])

    def scales(self, module: str, rows: slice | None = None) -> NDArray[np.float32]:
        """Return the scales, [out, in/group], or [out, 1] without groups.

        They are positive and exact in bfloat16 and in fp16, unless another tool chose them (`Format.scales`).
        """
        return self._of_groups(f"{module}.weight_scale", module, rows)

    def minima(self, module: str, rows: slice | None = None) -> NDArray[np.float32] | None:
        """Return what each group adds, [out, in/group]: the value of the packed integer 0. None where it adds nothing.

        `integers` are less than packed ones by 8 or 128; with them, a group adds its minimum and 8 or 128 scales.
        """
        if not self.format_of(module).minima:
            return None
        return self._of_groups(f"{module}.weight_minimum", module, rows)

    def floats(self, name: str, rows: slice | NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Return a tensor stored in float (norms, biases, float recipes), by its name in the model."""
        return self._tensors.floats(on_disk(self.model, name), rows)

    def dequantised(self, module: str, rows: slice | NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Return integer × scale in float32; for a module stored in float, its weights."""
        if self.format_of(module).is_float:
            return self.floats(f"{module}.weight", rows)
        self.scales(module, slice(0, 0))  # checks all scales of the module
        self.minima(module, slice(0, 0))
        return dequantised_rows(self._tensors, self.model, self.tensor_of(module), self.format_of(module), rows)

    def tensor(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """Return any tensor of the model, or some of its rows, in float32, dequantised if it is stored as integers."""
        module = name.removesuffix(".weight")
        is_module = module != name and module in self._modules
        return self.dequantised(module, rows) if is_module else self.floats(name, rows)

    def holds(self, name: str, values: NDArray[np.float32], rows: slice | None = None) -> bool:
        """Return True if a target holds these values for a tensor, or for some of its rows: they are equal to `tensor`.

        What groups with minima add may be rounded, by `MINIMA_WITHIN` of the step between two integers, and their
        smallest scales as far as float16 goes.
        """
        exact, module = self.tensor(name, rows), name.removesuffix(".weight")
        if values.shape != exact.shape or module not in self._modules or not self.format_of(module).minima:
            return bool(np.array_equal(values, exact))
        steps = np.abs(self.scales(module, rows))
        allowed = np.repeat(steps, exact.shape[1] // steps.shape[1], axis=1) * np.float32(MINIMA_WITHIN) + np.float32(
            2.0**-20
        )
        return bool((np.abs(values - exact) <= allowed).all())

    def place(self, name: str) -> TensorBytes:
        """Return path, offset and length of a stored tensor's bytes, e.g. of `<module>.weight_packed`."""
        return self._tensors.place(on_disk(self.model, name))

    def release(self) -> None:
        """Return all mapped pages to the system."""
        for name in self._tensors.entries:
            self._tensors.release(name)

    def verify(self) -> None:
        """Check the hash of every file and the range of every scale. Raises `InvalidInput`."""
        for name, file in self.manifest.files.items():
            if file_sha256(self.folder / name) != file.sha256:
                raise DamagedArtifact(
                    f"{self.folder / name}: its bytes are not those that were written; quantise again"
                )
        for module in self._modules:
            if not self.format_of(module).is_float:
                self.scales(module, slice(0, 0))
                self.minima(module, slice(0, 0))
                shape = tuple(self._array(f"{module}.weight_shape").tolist())
                if shape != self._modules[module].shape:
                    raise InvalidInput(f"{self.folder}: tensor {module}.weight_shape says {shape}")
        self.release()

    def copy_to(self, output: Path) -> None:
        """Copy the folder to `output`, which must not exist; a failure leaves nothing there."""
        copy_folder(self.folder, [*self.manifest.files, MANIFEST], output)

    def _array(self, name: str) -> NDArray[Any]:
        return self._tensors.array(on_disk(self.model, name))

    def _of_groups(self, name: str, module: str, rows: slice | None) -> NDArray[np.float32]:
        """Return scales or minima; all of them are checked once."""
        self._quantised(module)
        stored = on_disk(self.model, name)
        if name not in self._checked:
            _check_scales(self.folder, stored, self._tensors.floats(stored), self.format_of(module))
            self._checked.add(name)
        return self._tensors.floats(stored, rows)

    def _quantised(self, module: str) -> tuple[Tensor, int]:
        tensor, stored = self.tensor_of(module), self.format_of(module)
        if stored.is_float:
            raise InvalidInput(f"{self.folder}: {quote_short(module)} is stored as {stored} and has no integers")
        return tensor, bits_of(stored)


def dequantised_rows(
    tensors: TensorFolder,
    model: ModelSpec,
    tensor: Tensor,
    stored: Format,
    rows: slice | NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """Return a tensor of the model, or some of its rows, as integer × scale (+ minimum) in float32."""
    if stored.is_float:
        return tensors.floats(on_disk(model, tensor.name), rows)
    outputs, inputs = tensor.shape
    bits = bits_of(stored)
    packed = tensors.array(on_disk(model, f"{tensor.module}.weight_packed")).view(np.uint8)
    packed = packed.reshape(outputs, row_bytes(inputs, bits))
    scales = tensors.floats(on_disk(model, f"{tensor.module}.weight_scale"), rows)
    minima = tensors.floats(on_disk(model, f"{tensor.module}.weight_minimum"), rows) if stored.minima else None
    packed = packed if rows is None else packed[rows]
    unpacked = unpack if minima is None else unpack_unsigned

    def dequantised(some: slice) -> NDArray[np.float32]:
        added = None if minima is None else minima[some]
        return IntegerRows(unpacked(packed[some], bits, inputs), scales[some], added).dequantised()

    return in_slices(np.empty((len(packed), inputs), np.float32), dequantised)


def is_module(tensor: Tensor) -> bool:
    """Return True for a matrix that recipes can quantise."""
    return len(tensor.shape) >= 2 and tensor.role in ("embedding", "head", "linear", "expert")


def weights_store(root: Path | None = None) -> ContentStore:
    """Neutral weights by key, under `root` or in the user's cache."""
    return ContentStore(root) if root else bounded_store("weights")


def find_weights(store: ContentStore, sha256: str) -> NeutralWeights | None:
    """Open the stored weights with this hash, or None. They are not dropped while the returned object exists."""
    for folder in store.folders():
        try:
            if is_neutral(folder) and read_manifest(folder).weights_sha256 == sha256:
                return open_held(store, folder.name, _refuse, NeutralWeights.open)
        except EdgekitError:
            continue  # damaged, or another process has dropped it
    return None


def _refuse(folder: Path) -> None:
    raise DamagedArtifact(f"{folder}: the weights are gone or damaged")


def open_held(
    store: ContentStore,
    key: str,
    make: Callable[[Path], None],
    check: Callable[[Path], object],
    waiting: Callable[[str], None] = lambda holder: None,
) -> NeutralWeights:
    """Open the weights of `key` as `ContentStore.get` finds them. They are not dropped while the result exists."""
    folder, hold = store.hold(key, make, check, waiting)
    try:
        weights = NeutralWeights.open(folder)
    except BaseException:
        hold.close()
        raise
    weakref.finalize(weights, hold.close)
    return weights


def is_neutral(folder: Path) -> bool:
    """Return True for a folder of neutral weights, as `edgekit quantize` writes them."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> NeutralManifest:
    """Read the manifest of a folder of neutral weights."""
    path = folder / MANIFEST
    if not is_neutral(folder):
        raise InvalidInput(f"{folder}: holds no {MANIFEST}; make neutral weights with `edgekit quantize MODEL -o DIR`")
    data = read_bytes(path, _MAX_MANIFEST_BYTES)
    return read_sealed_json(
        data, NeutralManifest, str(path), versions=MANIFEST_VERSION, sealed_since=2, fix="quantise again"
    )[0]


def expected_tensors(model: ModelSpec, recipe: Recipe) -> Iterable[StoredTensor]:
    """Yield the stored tensors of a model, in its order."""
    for tensor in model.tensors():
        yield from stored_as(tensor, recipe.format_of(tensor))


def _check_tensors(folder: Path, manifest: NeutralManifest, tensors: TensorFolder) -> None:
    if manifest.recipe.is_native():
        raise InvalidInput(f"{folder}: recipe {manifest.recipe.name} is a vendor's own format, not neutral weights")
    unknown: Mapping[str, object] = dict(tensors.entries)
    for model_name, dtype, shape in expected_tensors(manifest.model, manifest.recipe):
        name = on_disk(manifest.model, model_name)
        entry = tensors.entry(name)
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise InvalidInput(
                f"{folder}: tensor {quote_short(name)} is {entry.dtype} {entry.shape}, expected {dtype} {shape}"
            )
        unknown.pop(name)  # type: ignore[attr-defined]
    if unknown:
        raise InvalidInput(f"{folder}: tensor {quote_short(next(iter(unknown)))} belongs to no module of the model")


def _check_scales(folder: Path, name: str, scales: NDArray[np.float32], stored: Format) -> None:
    if stored.scales is None:
        fine, allowed = (scales >= MIN_SCALE) & (scales <= MAX_SCALE), f"between 2^-17 and {MAX_SCALE:.0f}"
    else:
        fine, allowed = np.isfinite(scales), "finite"
    if not fine.all():
        row, column = np.argwhere(~fine)[0]
        raise InvalidInput(
            f"{folder}: tensor {quote_short(name)}: {scales[row, column]} at [{row}, {column}] is not {allowed}"
        )
