"""The origin of an artifact's model: repository, revision, licence and base, as far as its source says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from edgekit.common.files import is_gguf
from edgekit.common.parsing import MAX_YAML_BYTES, read_bytes
from edgekit.contracts.manifest import ModelOrigin
from edgekit.errors import EdgekitError
from edgekit.model.known_models import known_models
from edgekit.model.source import BUNDLED

if TYPE_CHECKING:
    from edgekit.contracts.neutral import NeutralWeights
    from edgekit.model.source import ModelSource

_LONGEST = 300
_SNAPSHOT = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})\Z")


def origin_of(source: ModelSource, weights: NeutralWeights) -> ModelOrigin:
    """Describe the source of neutral weights. Nothing is guessed: a fact that no file states stays None."""
    stated = _stated(source)
    snapshot = _SNAPSHOT.search(source.folder.as_posix())
    known = {each.id.rpartition("/")[2]: each for each in known_models().models}.get(source.name)
    calibration = weights.manifest.calibration
    return ModelOrigin(
        repository=(f"{snapshot[1]}/{snapshot[2]}" if snapshot else None) or stated.get("repository"),
        revision=snapshot[3] if snapshot else None,
        licence=stated.get("licence") or (known.licence if known else None),
        base=stated.get("base"),
        source_files=dict(sorted(weights.manifest.source_files.items())[:1000]),
        calibration_sha256=calibration.sha256 if calibration else None,
        calibration_tokens=calibration.tokens if calibration else None,
    )


def _stated(source: ModelSource) -> dict[str, str]:
    """Return the facts stated in the model's own files."""
    if source.given in BUNDLED:
        return {"licence": "Apache-2.0", "repository": "edgekit (bundled)"}
    if is_gguf(source.weights):
        from edgekit.formats.gguf import GgufFile

        with GgufFile.open(source.weights) as file:
            return _facts(
                file.metadata, "general.license", "general.base_model.0.name", "general.source.huggingface.repository"
            )
    try:
        return _facts(
            _front_matter(read_bytes(source.folder / "README.md", MAX_YAML_BYTES)), "license", "base_model", ""
        )
    except (EdgekitError, yaml.YAMLError, RecursionError):
        return {}


def _facts(values: Mapping[str, Any], licence: str, base: str, repository: str) -> dict[str, str]:
    found = {"licence": values.get(licence), "base": values.get(base), "repository": values.get(repository)}
    if isinstance(found["base"], list) and found["base"]:
        found["base"] = found["base"][0]
    return {name: " ".join(text.split())[:_LONGEST] for name, text in found.items() if isinstance(text, str) and text}


def _front_matter(data: bytes) -> dict[str, Any]:
    """Return the YAML at the beginning of a model card; aliases, which could expand without bound, are refused."""
    text = data.decode(errors="replace")
    if not text.startswith("---\n"):
        return {}
    block = text[4:].partition("\n---")[0]
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(block, Loader=yaml.SafeLoader)):
        return {}
    value = yaml.safe_load(block)
    return value if isinstance(value, dict) else {}
