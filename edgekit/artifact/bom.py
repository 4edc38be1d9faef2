"""A bill of materials of an artifact (CycloneDX ML-BOM 1.7), and a model card in Markdown, from the same facts."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from edgekit.common.packages import TARGET_PACKAGES
from edgekit.common.units import show_bytes
from edgekit.contracts.manifest import Manifest, ModelOrigin
from edgekit.contracts.recipe import bits_per_weight

BOM_FILE, CARD_FILE = "bom.cdx.json", "MODEL_CARD.md"
_NAMESPACE = uuid.UUID("5f3a8c0e-6c53-4a53-9f0b-6b1f3c0a7d17")
# SPDX identifiers by the lower-case names that model cards use; another licence is given by its name.
_SPDX = {
    each.lower(): each
    for each in ("Apache-2.0", "MIT", "BSD-3-Clause", "CC-BY-4.0", "CC-BY-SA-4.0", "CC-BY-NC-4.0", "CC0-1.0", "MPL-2.0")
}

_NOT_STATED = "not stated by the source"
_TERMS = {"gemma": "https://ai.google.dev/gemma/terms"}  # licences that SPDX does not list


def bill_of_materials(manifest: Manifest, sha256: str | None = None) -> bytes:
    """Return the bill of an artifact as JSON; equal facts give equal bytes.

    `sha256` is the artifact's; None while it is being sealed.
    """
    plan, origin = manifest.plan, manifest.origin or ModelOrigin()
    model: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": plan.model.name,
        "version": origin.revision or manifest.weights_sha256[:12],
        "description": f"{plan.model.name} as {plan.built_as} for {plan.device}",
        "hashes": [{"alg": "SHA-256", "content": sha256 or manifest.weights_sha256}],
        "modelCard": _model_card(manifest, origin),
        "properties": _properties(manifest, origin, sha256),
    }
    if origin.licence:
        model["licenses"] = [_licence(origin.licence)]
    if origin.base or origin.repository:
        ancestor = origin.base or str(origin.repository)
        model["pedigree"] = {"ancestors": [{"type": "machine-learning-model", "name": ancestor}]}
    files: list[dict[str, Any]] = [
        {
            "type": "file",
            "bom-ref": f"file:{name}",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": fact.sha256}],
            "properties": [{"name": "edgekit:bytes", "value": str(fact.bytes)}],
        }
        for name, fact in sorted(manifest.files.items())
    ]
    engines, makers = _packages(manifest)
    components = [*files, *(_package(*each) for each in engines)]
    seed = sha256 or manifest.model_dump_json()
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.7.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, seed)}",
        "version": 1,
        "metadata": {"component": model, "tools": {"components": [_package(*each) for each in makers]}},
        "components": components,
        "dependencies": [{"ref": "model", "dependsOn": [each["bom-ref"] for each in components]}],
    }
    return (json.dumps(bill, indent=1, ensure_ascii=False) + "\n").encode()


def model_card(manifest: Manifest, sha256: str | None = None) -> bytes:
    """Return a model card in Markdown."""
    plan, origin = manifest.plan, manifest.origin or ModelOrigin()
    made = plan.quantisation
    rows: list[tuple[str, object]] = [
        ("Model", f"{plan.model.name} ({plan.model.family}), {plan.model.parameters:,} parameters"),
        ("Source", _source(manifest, origin)),
        ("Revision", origin.revision or "not stated"),
        ("Base model", origin.base or "not stated"),
        ("Licence", " ".join(_licence(origin.licence)["license"].values()) if origin.licence else _NOT_STATED),
        ("Built for", f"{plan.device}: {plan.target} {plan.backend}"),
        ("Quantisation", f"{plan.recipe.name} by {made.method if made else 'no method'}, {_bits(manifest)}"),
        ("Calibration", _calibration(manifest, origin)),
        ("Context", f"{plan.context:,} tokens"),
        ("Memory", f"{show_bytes(plan.estimate.total_bytes)} predicted for {plan.sequences} at a time"),
        *((name, f"{value} ({basis})") for name, value, basis in _figures(manifest)),
        ("Self-check", manifest.self_check),
        ("Weights", f"sha256 {manifest.weights_sha256}"),
    ]
    if sha256 is not None:
        rows.append(("Artifact", f"sha256 {sha256}"))
    lines = [f"# {plan.model.name}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in rows]
    for title, packages in zip(("Runs with", "Made with"), _packages(manifest), strict=True):
        lines += ["", f"## {title}", "", *(f"- {name} {version}" for name, version in packages)]
    if plan.all_notes:
        lines += ["", "## Notes", "", *(f"- {_cell(note)}" for note in plan.all_notes)]
    return ("\n".join(lines) + "\n").encode()


def _model_card(manifest: Manifest, origin: ModelOrigin) -> dict[str, Any]:
    plan, made = manifest.plan, manifest.plan.quantisation
    is_encoder = plan.model.encoder is not None
    vector = f"vector of {plan.model.vector_size} numbers" if is_encoder else "text"
    parameters: dict[str, Any] = {
        "task": "text-ranking" if plan.model.reranking else "feature-extraction" if is_encoder else "text-generation",
        "architectureFamily": "transformer",
        "modelArchitecture": plan.model.family,
        "inputs": [{"format": "text"}],
        "outputs": [{"format": "score" if plan.model.reranking else vector}],
    }
    if made is not None and made.calibration is not None:
        data: dict[str, Any] = {"type": "dataset", "name": f"calibration: {made.calibration}"}
        if origin.calibration_sha256:
            data["contents"] = {"properties": [{"name": "edgekit:sha256", "value": origin.calibration_sha256}]}
        parameters["datasets"] = [data]
    return {
        "modelParameters": parameters,
        "quantitativeAnalysis": {
            "performanceMetrics": [
                {"type": name, "value": value, "slice": slice_} for name, value, slice_ in _figures(manifest)
            ]
        },
    }


def _figures(manifest: Manifest) -> Sequence[tuple[str, str, str]]:
    """Return quality figures as (name, value, basis); the basis says how and on which text they were obtained."""
    quality = manifest.plan.quality
    if manifest.plan.model.encoder is not None or quality.kl is None:
        return ()  # an encoder predicts no tokens; its self-check compares hidden states
    basis = f"{'predicted' if quality.basis == 'prior' else quality.basis}: {quality.source}"
    return (
        ("KL divergence from the float model, nats per token", f"{quality.kl:g}", basis),
        ("Share of equal top tokens", f"{quality.same_top:g}", basis),
    )


def _properties(manifest: Manifest, origin: ModelOrigin, sha256: str | None) -> list[dict[str, str]]:
    plan, made = manifest.plan, manifest.plan.quantisation
    values: dict[str, object] = {
        "device": plan.device,
        "engine": f"{plan.target} {plan.backend}",
        "recipe": plan.recipe.name,
        "quantisation_method": made.method if made else None,
        "bits_per_weight": _bits(manifest),
        "calibration_sha256": origin.calibration_sha256,
        "calibration_tokens": origin.calibration_tokens,
        "source": _source(manifest, origin),
        "source_config_sha256": plan.model_sha256,
        "weights_sha256": manifest.weights_sha256,
        "artifact_sha256": sha256,
        "self_check": manifest.self_check,
        "parameters": plan.model.parameters,
        "context": plan.context,
        "memory_bytes": plan.estimate.total_bytes,
        "licence": origin.licence or _NOT_STATED,
    }
    values |= {f"source_file:{name}": sha for name, sha in origin.source_files.items()}
    return [{"name": f"edgekit:{name}", "value": str(value)} for name, value in values.items() if value is not None]


def _packages(manifest: Manifest) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return names and versions of the packages that run the artifact, and of others that had a part in making it."""
    own = TARGET_PACKAGES.get(manifest.plan.target, ())
    others = {name for names in TARGET_PACKAGES.values() for name in names} - set(own)
    tools = [(name, version) for name, version in sorted(manifest.tools.items()) if name not in others]
    return [each for each in tools if each[0] in own], [each for each in tools if each[0] not in own]


def _package(name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{quote(version)}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _source(manifest: Manifest, origin: ModelOrigin) -> str:
    """Return the name of the source, without the folders of the machine that built the artifact."""
    source = PurePath(manifest.plan.model_source)
    return origin.repository or (source.name if source.is_absolute() else manifest.plan.model_source)


def _licence(name: str) -> dict[str, Any]:
    spdx, terms = _SPDX.get(name.lower()), _TERMS.get(name.lower())
    return {"license": {"id": spdx} if spdx else {"name": name} | ({"url": terms} if terms else {})}


def _bits(manifest: Manifest) -> str:
    return f"{bits_per_weight(manifest.plan.model, manifest.plan.recipe):.3f} bits per weight"


def _calibration(manifest: Manifest, origin: ModelOrigin) -> str:
    made = manifest.plan.quantisation
    if made is None or made.calibration is None:
        return "none"
    return made.calibration + (f", sha256 {origin.calibration_sha256}" if origin.calibration_sha256 else "")


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").replace("<", "&lt;").split())
