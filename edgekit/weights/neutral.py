"""The quantised model before it is packed for a target: the one set of integers and scales that every target packs.

A folder of safetensors in the compressed-tensors `pack-quantized` layout with the model's config, tokenizer and chat
template, and `edgekit.json`, the manifest. Knows nothing of how the integers were chosen.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from edgekit.errors import DamagedArtifact, InvalidInput, clip
from edgekit.files import file_sha256
from edgekit.frozen import Frozen
from edgekit.model import ModelSpec, Tensor
from edgekit.reading import parse_json, read_bytes, validate
from edgekit.recipe import Format, Recipe
from edgekit.weights.packing import bf16_to_float32, row_bytes, unpack
from edgekit.weights.safetensors import Place, TensorFolder

if TYPE_CHECKING:
    from numpy.typing import NDArray

MANIFEST = "edgekit.json"
MANIFEST_VERSION = 1
MIN_SCALE = 2.0**-17  # the smallest scale that fp16 holds with all of bfloat16's bits
MAX_SCALE = 65280.0  # the largest bfloat16 that fp16 holds
FLOAT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MAX_MANIFEST_BYTES = 64 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

Method = Literal["none", "rtn", "gptq", "awq"]


class WeightFile(Frozen):
    """What a file of the folder must be."""

    bytes: int
    sha256: str


class CalibrationFact(Frozen):
    """On which text the integers were chosen."""

    sha256: str
    description: str
    sequences: int
    tokens: int


class Statistics(Frozen):
    """How far a module's stored weights are from those it was made of."""

    weight_error: float  # squared error over squared weights
    output_error: float | None = None  # the same of its outputs on the calibration text


class NeutralManifest(Frozen):
    """What the weights are and what they were made of."""

    version: int = MANIFEST_VERSION
    model: ModelSpec
    recipe: Recipe  # resolved: every module's format follows from it
    method: Method
    source_files: dict[str, str]  # file → sha256
    calibration: CalibrationFact | None = None
    tools: dict[str, str]
    files: dict[str, WeightFile]
    statistics: dict[str, Statistics]
    notes: tuple[str, ...] = ()

    @property
    def weights_sha256(self) -> str:
        """The hash of all integers, scales and floats."""
        lines = [
            f"{name} {file.sha256}\n" for name, file in sorted(self.files.items()) if name.endswith(".safetensors")
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


class StoredTensor(NamedTuple):
    """A tensor as it is stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def on_disk(model: ModelSpec, name: str) -> str:
    """The name under which a tensor stands in the folder, which is that of a plain text model.

    Models taken out of one that sees or hears keep their own names in the specification.
    """
    if name.startswith(f"{model.head}."):
        return "lm_head" + name.removeprefix(model.head)
    return "model." + name.removeprefix(model.prefix) if name.startswith(model.prefix) else name


def stored_as(tensor: Tensor, stored: Format) -> list[StoredTensor]:
    """What is stored for one tensor of the model, by the model's names."""
    if stored.is_float:
        return [StoredTensor(tensor.name, FLOAT_DTYPES[stored.kind], tensor.shape)]
    assert len(tensor.shape) == 2 and not stored.is_native, (tensor, stored)
    outputs, inputs = tensor.shape
    bits = bits_of(stored)
    return [
        StoredTensor(f"{tensor.module}.weight_packed", "I32", (outputs, row_bytes(inputs, bits) // 4)),
        StoredTensor(f"{tensor.module}.weight_scale", "BF16", (outputs, inputs // (stored.group or inputs))),
        StoredTensor(f"{tensor.module}.weight_shape", "I64", (2,)),
    ]


def bits_of(stored: Format) -> int:
    """Bits of one stored integer."""
    return 4 if stored.kind == "s4" else 8


class NeutralWeights:
    """Neutral weights, opened: the manifest is understood, every tensor is there and has its shape."""

    def __init__(self, folder: Path, manifest: NeutralManifest, tensors: TensorFolder) -> None:
        self.folder = folder
        self.manifest = manifest
        self.sha256 = manifest.weights_sha256
        self._tensors = tensors
        self._modules = {tensor.module: tensor for tensor in manifest.model.tensors() if is_module(tensor)}
        self._checked: set[str] = set()

    @staticmethod
    def open(folder: str | Path, *, verify: bool = False) -> NeutralWeights:
        """The weights in `folder`; with `verify`, every byte and every scale is checked too."""
        place = Path(folder)
        manifest = read_manifest(place)
        for name, file in manifest.files.items():
            path = place / name
            if not _FILE_NAME.fullmatch(name) or not path.is_file() or path.stat().st_size != file.bytes:
                raise DamagedArtifact(f"{path}: is missing or has not the {file.bytes:,} bytes it was written with")
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
        """Every module with a weight matrix, in the order of the model."""
        return list(self._modules)

    def tensor_of(self, module: str) -> Tensor:
        """The matrix of a module, as the model has it."""
        try:
            return self._modules[module]
        except KeyError:
            raise InvalidInput(f"{self.folder}: no module {clip(module)}; `edgekit inspect` lists them") from None

    def format_of(self, module: str) -> Format:
        """How a module's matrix is stored."""
        return self.recipe.format_of(self.tensor_of(module))

    def packed(self, module: str) -> NDArray[np.uint8]:
        """The bytes of `weight_packed`, mapped: [out, in/2] for s4 (value + 8, low nibble first), [out, in] for s8."""
        tensor, bits = self._quantised(module)
        outputs, inputs = tensor.shape
        stored = self._array(f"{module}.weight_packed").view(np.uint8)
        return stored.reshape(outputs, row_bytes(inputs, bits))[:, : -(-inputs * bits // 8)]

    def integers(self, module: str, rows: slice | None = None) -> NDArray[np.int8]:
        """The values, [out, in], in [-8, 7] or [-128, 127]."""
        tensor, bits = self._quantised(module)
        packed = self.packed(module)
        return unpack(packed if rows is None else packed[rows], bits, tensor.shape[1])

    def scales(self, module: str, rows: slice | None = None) -> NDArray[np.float32]:
        """[out, in/group], or [out, 1] for s8: positive, exact in bfloat16 and in fp16."""
        self._quantised(module)
        name = f"{module}.weight_scale"
        if module not in self._checked:
            _check_scales(self.folder, name, bf16_to_float32(self._array(name)))
            self._checked.add(module)
        return bf16_to_float32(self._array(name, rows))

    def floats(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """A tensor stored in float (norms, biases, float recipes), by its name in the model."""
        return self._tensors.floats(on_disk(self.model, name), rows)

    def dequantised(self, module: str, rows: slice | None = None) -> NDArray[np.float32]:
        """integer × scale in float32; for a module stored in float, its weights."""
        if self.format_of(module).is_float:
            return self.floats(f"{module}.weight", rows)
        self.scales(module, slice(0, 0))  # checked before they are used
        return dequantised_rows(self._tensors, self.model, self.tensor_of(module), self.format_of(module), rows)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Any tensor of the model in float32, dequantised where it is stored as integers."""
        module = name.removesuffix(".weight")
        return self.dequantised(module) if module != name and module in self._modules else self.floats(name)

    def place(self, name: str) -> Place:
        """Path, offset and length of a stored tensor's bytes, e.g. of `<module>.weight_packed`."""
        return self._tensors.place(on_disk(self.model, name))

    def release(self) -> None:
        """Give mapped pages back to the system."""
        for name in self._tensors.entries:
            self._tensors.release(name)

    def verify(self) -> None:
        """Every file has the bytes, and every scale the range, that the format promises."""
        for name, file in self.manifest.files.items():
            if file_sha256(self.folder / name) != file.sha256:
                raise DamagedArtifact(
                    f"{self.folder / name}: its bytes are not those that were written; quantise again"
                )
        for module in self._modules:
            if not self.format_of(module).is_float:
                self.scales(module)
                shape = tuple(self._array(f"{module}.weight_shape").tolist())
                if shape != self._modules[module].shape:
                    raise InvalidInput(f"{self.folder}: tensor {module}.weight_shape says {shape}")
        self.release()

    def _array(self, name: str, rows: slice | None = None) -> NDArray[Any]:
        return self._tensors.array(on_disk(self.model, name), rows)

    def _quantised(self, module: str) -> tuple[Tensor, int]:
        tensor, stored = self.tensor_of(module), self.format_of(module)
        if stored.is_float:
            raise InvalidInput(f"{self.folder}: {clip(module)} is stored as {stored} and has no integers")
        return tensor, bits_of(stored)


def dequantised_rows(
    tensors: TensorFolder,
    model: ModelSpec,
    tensor: Tensor,
    stored: Format,
    rows: slice | NDArray[np.int64] | None = None,
) -> NDArray[np.float32]:
    """A tensor of the model, or some of its rows, from what is stored of it: integer × scale in float32."""
    if stored.is_float:
        name = on_disk(model, tensor.name)
        if isinstance(rows, np.ndarray):
            return np.concatenate([tensors.floats(name, slice(row, row + 1)) for row in rows.tolist()])
        return tensors.floats(name, rows)
    outputs, inputs = tensor.shape
    bits = bits_of(stored)
    packed = tensors.array(on_disk(model, f"{tensor.module}.weight_packed")).view(np.uint8)
    packed = packed.reshape(outputs, row_bytes(inputs, bits))
    scales = tensors.array(on_disk(model, f"{tensor.module}.weight_scale"))
    if rows is not None:
        packed, scales = packed[rows], scales[rows]
    values = unpack(packed, bits, inputs).astype(np.float32).reshape(*scales.shape, -1)
    values *= bf16_to_float32(scales)[:, :, None]
    return values.reshape(-1, inputs)


def is_module(tensor: Tensor) -> bool:
    """Whether a tensor is the matrix of a module that recipes speak of."""
    return len(tensor.shape) >= 2 and tensor.role in ("embedding", "head", "linear")


def read_manifest(folder: Path) -> NeutralManifest:
    """What `edgekit.json` says."""
    place = folder / MANIFEST
    if not place.is_file():
        raise InvalidInput(f"{folder}: holds no {MANIFEST}; `edgekit quantize MODEL -o DIR` writes such a folder")
    data = read_bytes(place, _MAX_MANIFEST_BYTES)
    version = parse_json(data, str(place)).get("version")
    if version != MANIFEST_VERSION:
        raise InvalidInput(f"{place}: version {clip(version)}, this edgekit reads {MANIFEST_VERSION}; quantise again")
    return validate(data, NeutralManifest, str(place))


def expected_tensors(model: ModelSpec, recipe: Recipe) -> Iterable[StoredTensor]:
    """Everything that stands on the disk for a model, in its order."""
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
                f"{folder}: tensor {clip(name)} is {entry.dtype} {entry.shape}, expected {dtype} {shape}"
            )
        unknown.pop(name)  # type: ignore[attr-defined]
    if unknown:
        raise InvalidInput(f"{folder}: tensor {clip(next(iter(unknown)))} belongs to no module of the model")


def _check_scales(folder: Path, name: str, scales: NDArray[np.float32]) -> None:
    fine = (scales >= MIN_SCALE) & (scales <= MAX_SCALE)
    if not fine.all():
        row, column = np.argwhere(~fine)[0]
        raise InvalidInput(
            f"{folder}: tensor {clip(name)}: scale {scales[row, column]} at [{row}, {column}] "
            f"is not between 2^-17 and {MAX_SCALE:.0f}"
        )
