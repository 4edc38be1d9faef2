"""Opens a model: a local Hugging Face folder, a hub id, or the bundled `demo` and `demo-draft`.

Planning reads `config.json`, the tokenizer's files and the headers of safetensors files, never a weight; code that a
checkpoint brings is never run, and pickled weights are refused by their type.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.errors import InvalidInput, Unsupported, clip
from edgekit.families import is_known, model_from_config, supported, with_generation
from edgekit.families.unknown import planned_from_shapes
from edgekit.model import ModelSpec
from edgekit.reading import MAX_TEXT_BYTES, parse_json, read_bytes

BUNDLED = {"demo": "target", "demo-draft": "draft"}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_INDEX = "model.safetensors.index.json"
_PLANNING_FILES = ("config.json", "generation_config.json", _INDEX, *TOKENIZER_FILES)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[A-Za-z0-9][\w./-]{0,95})?", re.ASCII)
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
# Stored by older libraries, computed by all.
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")


class ModelSource(NamedTuple):
    """A model that was opened. `folder` holds its files, the weights only where `has_weights`."""

    name: str
    folder: Path
    spec: ModelSpec
    config_sha256: str
    tokenizer_files: tuple[Path, ...]
    has_weights: bool


def open_source(model: str | Path, *, need_weights: bool = False, offline: bool = False) -> ModelSource:
    """The model of that folder, hub id or bundled name.

    Weights that are there must agree with `config.json`, tensor by tensor; `need_weights` asks that they are there, and
    fetches them where `model` is a hub id. `offline` takes from the hub's cache alone.
    """
    text = str(model)
    if text in BUNDLED:
        return _open_folder(Path(__file__).parent / "_demo" / BUNDLED[text], text, need_weights)
    path = Path(model)
    if text and path.is_dir():
        return _open_folder(path, _folder_name(path), need_weights)
    if isinstance(model, str) and _HUB_ID.fullmatch(model) and not path.exists():
        return _open_folder(_fetch(model, need_weights, offline), model.partition("@")[0].split("/")[1], need_weights)
    found = "is a file, not a folder" if path.is_file() else "is no folder"
    raise InvalidInput(
        f"model {clip(text)}: {found}; give a Hugging Face folder, a hub id such as Qwen/Qwen3-0.6B, or one of "
        f"{', '.join(BUNDLED)}"
    )


def _folder_name(path: Path) -> str:
    """The folder's own name; in a hub cache, where that is a hash, the repository's."""
    full = path.resolve()
    repository = _hub_repository(full)
    return repository.name.split("--")[-1] if repository else full.name


def _open_folder(folder: Path, name: str, need_weights: bool) -> ModelSource:
    config_path = _checked(folder, "config.json")
    data = read_bytes(config_path, MAX_TEXT_BYTES)
    config = parse_json(data, str(config_path))
    spec = _spec(config, name, str(config_path))
    if (folder / "generation_config.json").exists():
        path = _checked(folder, "generation_config.json")
        spec = with_generation(spec, parse_json(read_bytes(path, MAX_TEXT_BYTES), str(path)), str(path))
    has_weights = _has_weights(folder)
    if not has_weights:
        _refuse_pickles(folder)
    if has_weights or need_weights:
        for path in sorted(folder.glob("*.safetensors")):
            _checked(folder, path.name)
        spec = _as_stored(folder, spec, "text_config" in config)
    return ModelSource(
        name=name,
        folder=folder,
        spec=spec,
        config_sha256=hashlib.sha256(data).hexdigest(),
        tokenizer_files=tuple(_checked(folder, file) for file in TOKENIZER_FILES if (folder / file).exists()),
        has_weights=has_weights,
    )


def _checked(folder: Path, name: str) -> Path:
    """A file of the folder. A link may lead inside the folder or, in a hub cache, to the repository's blobs."""
    path = folder / name
    try:
        real, home = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "its links lead nowhere"
        raise InvalidInput(f"{path}: cannot be read: {reason}; is {folder} a whole model folder?") from error
    if not real.is_relative_to(_hub_repository(home) or home):
        raise InvalidInput(f"{path}: is a link that leaves the model's folder, to {real}; copy the file there instead")
    return path


def _hub_repository(folder: Path) -> Path | None:
    """The repository in whose hub cache `folder` is a snapshot."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent
    return None


def _has_weights(folder: Path) -> bool:
    """Whether every safetensors file that the folder promises is there."""
    if (folder / "model.safetensors").exists():
        return True
    if (folder / _INDEX).exists():
        shards = parse_json(read_bytes(_checked(folder, _INDEX), 100_000_000), str(folder / _INDEX)).get("weight_map")
        names = {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()
        # A name that is no plain file name counts as there, so that whoever opens the shards refuses it.
        return all(Path(name).name != name or "\0" in name or (folder / name).exists() for name in names)
    return len(list(folder.glob("*.safetensors"))) == 1


def _refuse_pickles(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in _PICKLES and path.name != "training_args.bin":
            raise Unsupported(
                f"{path}: pickled weights can run code when they are opened; "
                "save the model as safetensors (save_pretrained does) and give that folder"
            )


def _as_stored(folder: Path, spec: ModelSpec, is_wrapped: bool) -> ModelSpec:
    """`spec` with the names that the files use, once every stored tensor was found to agree with it."""
    from edgekit.weights.safetensors import TensorFolder  # numpy is not needed where there are no weights

    with TensorFolder.open(folder) as stored:
        shapes = {name: entry.shape for name, entry in stored.entries.items()}
    if spec.exportable:
        return spec  # packed by somebody else's quantiser, or only sized
    for prefix in (spec.prefix, *_PREFIXES):
        if f"{prefix}embed_tokens.weight" in shapes:
            heads = (spec.head, "lm_head", "language_model.lm_head")
            head = next((name for name in heads if f"{name}.weight" in shapes), spec.head)
            spec = spec.model_copy(update={"prefix": prefix, "head": head})
            break
    _agree(folder, spec, shapes, is_wrapped)
    return spec


def _agree(folder: Path, spec: ModelSpec, shapes: dict[str, tuple[int, ...]], is_wrapped: bool) -> None:
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
    if surplus := [name for name in shapes if name not in expected and not _may_stand(name, spec, is_wrapped)]:
        faults.append(f"not in a {spec.family} model: {_some(sorted(surplus))}")
    if faults:
        raise InvalidInput(
            f"{folder}: weights and config.json disagree; {'; '.join(faults)}; take both from the same model"
        )


def _may_stand(name: str, spec: ModelSpec, is_wrapped: bool) -> bool:
    """A copy of a tied head, what is computed anyway, and what a wrapped model sees and hears with."""
    if spec.tied and name == f"{spec.head}.weight":
        return True
    return bool(_COMPUTED.fullmatch(name)) or (is_wrapped and not name.startswith(spec.prefix))


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:200] for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _spec(config: dict[str, Any], name: str, where: str) -> ModelSpec:
    model_type = config.get("model_type")
    if is_known(config) or not isinstance(model_type, str):
        return model_from_config(config, name, where)
    refusal = f"{where}: model_type: {clip(model_type)} is not supported; supported: {supported()}"
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
    return planned_from_shapes(config, _own_names(normalized, aliases), name, where, supported())


def _own_names(normalized: Any, aliases: dict[str, str]) -> dict[str, str]:
    """How a family calls its sizes: optimum's attributes of a class, or arguments bound to one, and its aliases."""
    described = getattr(normalized, "func", normalized)
    found = {key.lower(): getattr(described, key) for key in dir(described) if key.isupper()}
    found |= getattr(normalized, "keywords", {})
    return {key: aliases.get(value, value) for key, value in found.items() if isinstance(value, str)}


def _fetch(model: str, need_weights: bool, offline: bool) -> Path:
    """The folder of a hub id, in the hub's cache: the files for planning, and the weights where they are needed."""
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
            f"model {clip(model)}: no such model on the hub, or it needs an account: accept its licence there and run "
            "`hf auth login`; or give a local folder"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidInput(f"model {clip(model)}: the hub has no revision {clip(revision)} of it") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "edgekit is offline" if without_network else "the hub cannot be reached"
        raise InvalidInput(
            f"model {clip(model)}: {why}, and it is not in the hub's cache; "
            "give a local folder, or fetch it where there is a network"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(f"model {clip(model)}: the hub answered: {clip(first, 200)}; try again") from error
