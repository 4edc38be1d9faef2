"""Opens a model: a local Hugging Face folder, a GGUF file, a hub id, or the bundled `demo` and `demo-draft`.

Opening reads `config.json`, the tokenizer's files and the headers of the weights. Code in a checkpoint is never run,
and pickled weights are refused by their type.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edgekit.common.files import is_gguf
from edgekit.common.parsing import MAX_TEXT_BYTES, parse_json, read_bytes
from edgekit.errors import InvalidInput, Unsupported, near_names, quote_short
from edgekit.formats.quant_scheme import QuantScheme
from edgekit.model.families import bert, is_extra, is_known, model_from_config, supported, with_generation
from edgekit.model.families.fields import Fields
from edgekit.model.families.quant_scheme import quant_scheme
from edgekit.model.families.unknown import names_of_sizes, planned_from_shapes
from edgekit.model.reranking import read_reranking
from edgekit.model.spec import ModelSpec
from edgekit.model.text_embedding import FILES, dense_weights, read_text_embedding
from edgekit.model.tokenizer_file import check_small_files

if TYPE_CHECKING:
    from edgekit.formats.expert_stacks import ExpertStacks
    from edgekit.formats.gguf_tensors import GgufTensors
    from edgekit.formats.int_packing import IntegerFormat, ScaleType
    from edgekit.formats.quantised import QuantisedTensors
    from edgekit.formats.safetensors import TensorFolder
    from edgekit.model.head_spec import HeadSpec

    SourceTensors = TensorFolder | GgufTensors | QuantisedTensors | ExpertStacks

BUNDLED = {"demo": "target", "demo-draft": "draft"}
# The package has the neutral weights of `demo`; only a clone has its sealed artifact for the onnx target
# (examples/training/quantise_demo.py makes both), and the floats of both models.
DEMO_ARTIFACT = Path(__file__).parents[1] / "_demo" / "artifact"
DEMO_WEIGHTS = DEMO_ARTIFACT.parent / "model"
_DEMO_FLOATS = Path(__file__).parents[2] / "examples" / "training" / "demo"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_INDEX = "model.safetensors.index.json"
_PLANNING_FILES = ("config.json", "generation_config.json", _INDEX, *TOKENIZER_FILES, *FILES)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[A-Za-z0-9][\w./-]{0,95})?", re.ASCII)
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
_FLOATS = {"F32", "F16", "BF16", "F64"}
# Buffers that older libraries stored and all libraries compute.
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")


class SourceMatrix(NamedTuple):
    """The stored type of one matrix, its number of values, and the integer format where it is integer × scale."""

    type: str
    values: int
    integers: IntegerFormat | None


class ModelSource(NamedTuple):
    """An opened model: open it once per command and pass it on.

    `folder` holds its files, `weights` its tensors where `has_weights`.
    """

    given: str  # the model as the caller named it: a folder, file, hub id or bundled name
    name: str
    folder: Path
    weights: Path  # the folder again, or the GGUF file
    spec: ModelSpec
    config_sha256: str
    tokenizer_files: tuple[Path, ...]
    has_weights: bool
    quantised_as: str | None = None  # the types of the matrices, most values first; None: they are float
    # By tensor name. Without weights: empty, or derived from the config of a quantised model.
    matrices: Mapping[str, SourceMatrix] = {}
    notes: tuple[str, ...] = ()  # on how the file was read
    hold: object = None  # keeps `folder` in the cache while this object exists

    def with_weights(self) -> ModelSource:
        """Return this model with its weights, which are downloaded for a hub id that was opened without them."""
        return self if self.has_weights else open_source(self.given, need_weights=True)

    def hashes(self) -> dict[str, str]:
        """Return the hash of every file of a model with weights, by its name; an unchanged file is not read again."""
        from edgekit.model.source_files import source_hashes

        with open_tensors(self.weights) as tensors:
            return source_hashes(self.folder, tensors.files.values())

    def read_head(self, folder: Path, model: ModelSpec | None = None) -> HeadSpec:
        """Return the sizes of a drafting head for this model. Raises for a head of another one, or a damaged one."""
        from edgekit.model.heads import read_head

        head = read_head(folder, model or self.spec)
        head.close()
        self.check_draft(folder)
        return head.spec

    def check_draft(self, folder: Path) -> None:
        """Refuse a drafter with another tokenizer, where both have one; the error names the first difference."""
        from edgekit.model.same_vocabulary import check_same_vocabulary

        if all((each / "tokenizer.json").exists() for each in (folder, self.folder)):
            check_same_vocabulary(self.folder, folder)

    def with_own_integers(self) -> ModelSource:
        """Return this model, with its weights if they are quantised: the recipe is read from them."""
        return self.with_weights() if self.quantised_as else self


def open_source(model: str | Path, *, need_weights: bool = False, offline: bool = False) -> ModelSource:
    """Open a model: a folder, a GGUF file, a hub id or a bundled name.

    Weights that are present must agree with `config.json`, tensor by tensor. `need_weights` requires them, and
    downloads the files of a hub id. `offline` only reads the hub's cache.
    """
    text = str(model)
    path = Path(model)
    if text in BUNDLED:
        opened = _open_bundled(text, need_weights)
    elif text and (path / "manifest.json").is_file() and not (path / "config.json").is_file():
        raise InvalidInput(
            f"{path}: is an artifact already; `edgekit inspect {path}` shows its plan; to plan anew, give the model "
            "that it was made of"
        )
    elif text and path.is_dir():
        opened = open_folder(path, _folder_name(path), need_weights)
    elif is_gguf(path):
        opened = _open_gguf(path)
    elif isinstance(model, str) and _HUB_ID.fullmatch(model) and not path.exists():
        name = model.partition("@")[0].split("/")[1]
        opened = open_folder(_download(model, need_weights, offline), name, need_weights)
    else:
        raise unknown_model(text)
    return opened._replace(given=text)


def unknown_model(model: str) -> InvalidInput:
    """Return the error for a model that does not exist, with the most similar name or path."""
    path = Path(model)
    near = near_names(model, [*BUNDLED, *map(str, islice(path.parent.glob("*"), 1000))], most=1)
    hint = f"did you mean {near[0]}? Else " if near else ""
    return InvalidInput(
        f"model {quote_short(model)}: {'is a file, not a folder' if path.is_file() else 'does not exist'}; {hint}give "
        f"an artifact, a Hugging Face folder, a .gguf file, a hub id such as Qwen/Qwen3-0.6B, or one of "
        f"{', '.join(BUNDLED)}"
    )


def _open_bundled(name: str, need_weights: bool) -> ModelSource:
    floats = _DEMO_FLOATS / BUNDLED[name]
    if name != "demo" and not floats.is_dir():
        raise InvalidInput(f"model {name}: only a clone of edgekit's repository has it; give another model, or demo")
    return open_folder(floats if floats.is_dir() else DEMO_WEIGHTS, name, need_weights)


def open_tensors(weights: Path) -> SourceTensors:
    """Open the tensors of a model by Hugging Face's names; close the result to unmap the files."""
    from edgekit.formats.expert_stacks import ExpertStacks
    from edgekit.formats.quantised import QuantisedTensors
    from edgekit.formats.safetensors import TensorFolder  # numpy is not needed where there are no weights
    from edgekit.model.gguf_source import open_gguf_tensors

    if is_gguf(weights):
        return open_gguf_tensors(weights)
    folder = TensorFolder.open(weights).with_files(dense_weights(weights))
    config = _config(weights / "config.json")
    if config.get("model_type") == "bert":
        folder = folder.renamed(bert.name_of)
    scheme = _scheme(weights / "config.json")
    if scheme is not None and scheme.layout != "mxfp4":
        return QuantisedTensors(folder, scheme)
    return ExpertStacks.within(folder) if config.get("model_type") == "gpt_oss" else folder


def _config(path: Path) -> dict[str, Any]:
    """Return the config in the folder of the weights; empty if there is none."""
    return parse_json(read_bytes(path, MAX_TEXT_BYTES), str(path)) if path.is_file() else {}


def _scheme(config: Path) -> QuantScheme | None:
    """Return the quantisation scheme of a config; None for one that edgekit does not read."""
    try:
        return quant_scheme(Fields(_config(config), str(config)))
    except Unsupported:
        return None


def _open_gguf(path: Path) -> ModelSource:
    from edgekit.model.gguf_source import open_gguf  # numpy is not needed for other models

    opened = open_gguf(path)
    with opened.tensors as stored:
        source = open_folder(opened.folder, opened.name, need_weights=False, weights=path, stored=stored)
    return source._replace(hold=opened.hold, notes=opened.notes)


def _folder_name(path: Path) -> str:
    """Return the folder's name; in a hub cache, where that is a hash, the repository's."""
    full = path.resolve()
    repository = hub_repository(full)
    return repository.name.split("--")[-1] if repository else full.name


def open_folder(
    folder: Path, name: str, need_weights: bool, weights: Path | None = None, stored: SourceTensors | None = None
) -> ModelSource:
    """Open a model's folder. `weights`: the file that has them instead, and `stored`, as it was opened."""
    config_path = checked_file(folder, "config.json")
    data = read_bytes(config_path, MAX_TEXT_BYTES)
    config = parse_json(data, str(config_path))
    spec = _spec(config, name, str(config_path))
    if (folder / "generation_config.json").exists():
        path = checked_file(folder, "generation_config.json")
        spec = with_generation(spec, parse_json(read_bytes(path, MAX_TEXT_BYTES), str(path)), str(path))
    fields = Fields(config, str(config_path))
    embedding, reranking = read_text_embedding(folder, fields, spec), read_reranking(folder, spec, fields)
    spec = spec.model_copy(update={"embedding": embedding, "reranking": reranking})
    has_weights = weights is not None or _has_weights(folder)
    matrices: Mapping[str, SourceMatrix] = {}
    if not has_weights:
        _refuse_pickles(folder)
        matrices = _assumed(config, spec, config_path)
    if has_weights or need_weights:
        for path in (*sorted(folder.glob("*.safetensors")), *dense_weights(folder).values()):
            checked_file(folder, str(path.relative_to(folder)))
        with stored or open_tensors(weights or folder) as found:
            spec, matrices = _as_stored(found, weights or folder, spec, "text_config" in config)
    tokenizer_files = tuple(checked_file(folder, file) for file in TOKENIZER_FILES if (folder / file).exists())
    check_small_files(tokenizer_files)
    return ModelSource(
        given=str(folder),
        name=name,
        folder=folder,
        weights=weights or folder,
        spec=spec,
        config_sha256=hashlib.sha256(data).hexdigest(),
        tokenizer_files=tokenizer_files,
        has_weights=has_weights,
        quantised_as=_quantised_as(matrices),
        matrices=matrices,
    )


def _has_weights(folder: Path) -> bool:
    """Return True if every safetensors file that the folder's index names is present."""
    if (folder / "model.safetensors").exists():
        return True
    if (folder / _INDEX).exists():
        shards = parse_json(read_bytes(checked_file(folder, _INDEX), 100_000_000), str(folder / _INDEX)).get(
            "weight_map"
        )
        names = {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()
        # A name that is not a plain file name counts as present: opening the shards refuses it and names it.
        return all(Path(name).name != name or "\0" in name or (folder / name).exists() for name in names)
    return len(list(folder.glob("*.safetensors"))) == 1


def _refuse_pickles(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in _PICKLES and path.name != "training_args.bin":
            raise Unsupported(
                f"{path}: pickled weights can run code when they are opened; "
                "save the model as safetensors (save_pretrained does) and give that folder"
            )


def _as_stored(
    stored: SourceTensors, weights: Path, spec: ModelSpec, is_wrapped: bool
) -> tuple[ModelSpec, dict[str, SourceMatrix]]:
    """Return `spec` with the tensor names of the files, and their matrices, after checking every tensor against it."""
    shapes = {name: entry.shape for name, entry in stored.entries.items()}
    matrices = {
        name: SourceMatrix(entry.dtype, prod(entry.shape), stored.integer_formats.get(name))
        for name, entry in stored.entries.items()
        if len(entry.shape) > 1 and not is_extra(spec.family, name)
    }
    if spec.exportable:
        return spec, matrices  # such a model is planned by its sizes alone
    for prefix in (spec.prefix, *_PREFIXES):
        if f"{prefix}embed_tokens.weight" in shapes:
            heads = (spec.head, "lm_head", "language_model.lm_head")
            head = next((name for name in heads if f"{name}.weight" in shapes), spec.head)
            spec = spec.model_copy(update={"prefix": prefix, "head": head})
            break
    _agree(weights, spec, shapes, is_wrapped)
    return spec, matrices


def _assumed(config: dict[str, Any], spec: ModelSpec, path: Path) -> dict[str, SourceMatrix]:
    """Return a quantised model's matrices from its config alone: linears as configured, other matrices in float."""
    scheme = _scheme(path)
    if scheme is None or spec.exportable:
        return {}
    from edgekit.formats.int_packing import IntegerFormat, held_group

    dtype = config.get("dtype") or config.get("torch_dtype")
    floats: ScaleType = "F16" if dtype == "float16" else "BF16"
    scales: ScaleType = "F16" if scheme.layout in ("gptq", "awq") else floats
    found: dict[str, SourceMatrix] = {}
    for tensor in spec.tensors():
        stored = scheme.modules.get(tensor.module, scheme.groups[0])
        is_held = tensor.is_linear or (scheme.layout == "mlx" and tensor.role in ("embedding", "head"))
        if len(tensor.shape) < 2:
            continue
        if scheme.layout == "mxfp4":
            stored_type = scheme.name if tensor.role == "expert" else floats
            found[tensor.name] = SourceMatrix(stored_type, tensor.size, None)
            continue
        if stored is None or not is_held:
            found[tensor.name] = SourceMatrix(floats, tensor.size, None)
            continue
        inputs = tensor.shape[-1]
        try:
            group = held_group(stored.bits, stored.group or inputs, inputs)
        except ValueError as error:
            raise Unsupported(f"{path}: {tensor.module}: has {error}; give the float model") from None
        has_minima = not scheme.symmetric and group is not None
        found[tensor.name] = SourceMatrix(
            scheme.name, tensor.size, IntegerFormat(stored.bits, group, scales, has_minima)
        )
    return found


def _quantised_as(matrices: Mapping[str, SourceMatrix]) -> str | None:
    """Return the types of all matrices, most values first; None if none is quantised."""
    values: Counter[str] = Counter()
    for matrix in matrices.values():
        values[matrix.type] += matrix.values
    return None if values.keys() <= _FLOATS else ", ".join(name for name, _ in values.most_common())


def _agree(weights: Path, spec: ModelSpec, shapes: dict[str, tuple[int, ...]], is_wrapped: bool) -> None:
    expected = {tensor.name: tensor.shape for tensor in spec.tensors()}
    faults = []
    if missing := [name for name in expected if name not in shapes]:
        faults.append(f"missing: {_some(missing)}")
    wrong = [
        f"{name} is {list(shapes[name])}, config.json says {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if wrong:
        faults.append(f"wrong shape: {_some(wrong)}")
    known = expected.keys() | _unused_keys_and_values(spec)
    if surplus := [name for name in shapes if name not in known and not _may_stand(name, spec, is_wrapped)]:
        faults.append(f"not in a {spec.family} model: {_some(sorted(surplus))}")
    if faults:
        raise InvalidInput(
            f"{weights}: weights and config.json disagree; {'; '.join(faults)}; take both from the same model"
        )


def _may_stand(name: str, spec: ModelSpec, is_wrapped: bool) -> bool:
    """Return True for a copy of a tied head, a computed buffer, or a tensor of a multimodal model's other parts."""
    if spec.tied and name == f"{spec.head}.weight":
        return True
    if is_extra(spec.family, name) or _COMPUTED.fullmatch(name):
        return True
    return is_wrapped and not name.startswith(spec.prefix)


def _unused_keys_and_values(spec: ModelSpec) -> set[str]:
    """Return tensors that published files hold for layers that attend to the keys and values of another layer."""
    owning = {"stores_kv": True, "has_values": True}
    layers = tuple(layer if layer.is_recurrent else layer.model_copy(update=owning) for layer in spec.layers)
    shared = (index for index, layer in enumerate(spec.layers) if not layer.stores_kv and not layer.is_recurrent)
    prefixes = tuple(f"{spec.prefix}layers.{index}.self_attn." for index in shared)
    whole = spec.model_copy(update={"layers": layers}).tensors() if prefixes else ()
    return {tensor.name for tensor in whole if tensor.name.startswith(prefixes)}


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:200] for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _spec(config: dict[str, Any], name: str, where: str) -> ModelSpec:
    model_type = config.get("model_type")
    if is_known(config) or not isinstance(model_type, str):
        return model_from_config(config, name, where)
    refusal = f"{where}: model_type: {quote_short(model_type)} is not supported; supported: {supported()}"
    try:
        from optimum.utils import NormalizedConfigManager
        from transformers import CONFIG_MAPPING
    except ImportError:
        raise Unsupported(
            f"{refusal}; with `pip install 'edgekit[quantize]'` the sizes of more families can be planned"
        ) from None
    try:
        normalized = NormalizedConfigManager.get_normalized_config_class(model_type)
        aliases = CONFIG_MAPPING[model_type].attribute_map
    except KeyError:
        raise Unsupported(refusal) from None
    return planned_from_shapes(config, names_of_sizes(normalized, aliases), name, where, supported())


def _download(model: str, need_weights: bool, offline: bool) -> Path:
    """Download a hub id to the hub's cache: the files for planning, and with `need_weights` the weights."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    repository, _, revision = model.partition("@")
    patterns = [*_PLANNING_FILES, *(["*.safetensors"] if need_weights else [])]
    without_network = offline or constants.HF_HUB_OFFLINE
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=patterns, local_files_only=without_network
            )
        )
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        raise InvalidInput(
            f"model {quote_short(model)}: no such model on the hub, or it needs an account: accept its licence "
            "there and run `hf auth login`; or give a local folder"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidInput(
            f"model {quote_short(model)}: the hub has no revision {quote_short(revision)} of it"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "edgekit is offline" if without_network else "the hub cannot be reached"
        raise InvalidInput(
            f"model {quote_short(model)}: {why}, and it is not in the hub's cache; "
            "give a local folder, or fetch it where there is a network"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(
            f"model {quote_short(model)}: the hub answered: {quote_short(first, 200)}; try again"
        ) from error


def checked_file(folder: Path, name: str) -> Path:
    """Return a file of the folder. A link must stay in the folder or, in a hub cache, in the repository."""
    path = folder / name
    try:
        real, home = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "its links lead nowhere"
        raise InvalidInput(f"{path}: cannot be read: {reason}; is {folder} a whole model folder?") from error
    if not real.is_relative_to(hub_repository(home) or home):
        raise InvalidInput(f"{path}: is a link that leaves the model's folder, to {real}; copy the file there instead")
    if not real.is_file():
        raise InvalidInput(f"{path}: not a regular file")
    return path


def hub_repository(folder: Path) -> Path | None:
    """Return the hub cache's repository that `folder` is a snapshot of; None outside a hub cache."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent
    return None
