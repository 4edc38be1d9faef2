"""Peers as arms of a benchmark: the artifact's own integers, written for another engine, and the Python that has it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from edgekit.artifact import Artifact
from edgekit.errors import EdgekitError, InvalidInput, UnknownName
from edgekit.files import home
from edgekit.measure.arms import Entrant
from edgekit.measure.entrants import formats_of
from edgekit.measure.measurement import Arm
from edgekit.measure.peers import folders, gguf
from edgekit.plan import MemoryFacts
from edgekit.recipe import Format, Recipe, Rule
from edgekit.source import open_source
from edgekit.speed import touched_weight_bytes
from edgekit.store import Store
from edgekit.weights.neutral import NeutralWeights, read_manifest
from edgekit.weights.quantise import neutral_weights

_WRITER = 1  # raised whenever the same weights would give other files
_PROGRAM = Path(__file__).with_name("program.py")


class Peer(NamedTuple):
    """Another engine: what is written for it, and what it then holds."""

    file: str  # what it opens, inside the folder that was written; "" for the folder
    write: Callable[[NeutralWeights, Path, int], None]
    stores: Callable[[Recipe], Recipe]  # what becomes of a recipe
    memory: MemoryFacts
    needs: str  # the package
    float_bits: int


def _in_blocks(recipe: Recipe) -> Recipe:
    rules = tuple(
        rule.model_copy(update={"format": Format(kind="s4", group=32)}) if rule.format.kind == "s4" else rule
        for rule in recipe.rules
    )
    return recipe.model_copy(update={"rules": rules})


def _float(recipe: Recipe) -> Recipe:
    wide = Format(kind="float32")
    return Recipe(name=recipe.name, rules=(Rule(pattern="*", format=wide),), float_format=wide)


def _float_ends(recipe: Recipe) -> Recipe:
    wide = Format(kind="float32")
    ends = tuple(Rule(pattern=pattern, format=wide) for pattern in ("*embed_tokens*", "*lm_head"))
    return recipe.model_copy(update={"rules": ends + recipe.rules, "float_format": wide})


def _facts(scale_bits: int, row_group: int | None, bias_bits: int = 0, float_bits: int | None = None) -> MemoryFacts:
    return MemoryFacts(
        mapped_share=0.0, private_share=1.0, runtime_bytes=0, scale_bits=scale_bits, bias_bits=bias_bits,
        row_group=row_group, float_bits=float_bits, source="the layout that is written for it",
    )  # fmt: skip


PEERS: dict[str, Peer] = {
    "llama.cpp": Peer(
        "model.gguf",
        lambda weights, folder, context: gguf.write_gguf(weights, folder / "model.gguf", context),
        _in_blocks, _facts(16, 32), "llama-cpp-python", 32,
    ),
    "onnxruntime-genai": Peer(
        "", lambda weights, folder, context: folders.write_olive(weights, folder),
        _float_ends, _facts(32, None), "onnxruntime-genai", 32,
    ),
    "mlx-lm": Peer(
        "", lambda weights, folder, context: folders.write_mlx(weights, folder),
        lambda recipe: recipe, _facts(32, 128, 32, 32), "mlx-lm", 32,
    ),
    "transformers": Peer(
        "", lambda weights, folder, context: folders.write_float(weights, folder),
        _float, _facts(32, None), "transformers torch", 32,
    ),
}  # fmt: skip


def peer_of(
    name: str,
    artifact: Artifact,
    weights: NeutralWeights,
    *,
    context: int,
    python: str | None = None,
    store: Store | None = None,
) -> Entrant:
    """The arm of a peer on the weights of an artifact; what it opens is written once and found again."""
    peer = known_peer(name)
    key = hashlib.sha256(f"{_WRITER} {name} {weights.sha256} {context}".encode()).hexdigest()
    place = (store or Store(home() / "peers")).get(key, lambda folder: peer.write(weights, folder, context), _whole)
    stored = peer.stores(weights.recipe)
    size = sum(path.stat().st_size for path in place.iterdir() if path.is_file())
    plan = artifact.plan
    return Entrant(
        arm=Arm(
            name=name,
            engine=name,
            engine_version="",
            model=weights.model.name,
            recipe=weights.recipe.name,
            formats=formats_of(weights.model, stored, size),
            weights_sha256=weights.sha256,
            threads=plan.threads,
            context=context,
            kv_bits=0,
        ),
        command=(python or sys.executable, str(_PROGRAM), name),
        opening={
            "files": str(place / peer.file),
            "context": context,
            "threads": plan.threads,
            "float_bits": peer.float_bits,
        },
        weight_bytes=touched_weight_bytes(weights.model, stored, peer.memory),
        cure=f"pip install {peer.needs}, or name a Python that has it with --peer-python",
    )


def known_peer(name: str) -> Peer:
    if name not in PEERS:
        raise UnknownName("peer", name, PEERS)
    return PEERS[name]


def weights_of(artifact: Artifact, given: Path | None = None, store: Store | None = None) -> NeutralWeights:
    """The neutral weights that an artifact was packed from: given, in the store, or made again from its model."""
    wanted = artifact.manifest.weights_sha256
    if given is not None:
        weights = NeutralWeights.open(given)
        if weights.sha256 != wanted:
            raise InvalidInput(
                f"--weights {given}: are not those of {artifact.folder}; give the ones it was packed from"
            )
        return weights
    kept = store or Store()
    for folder in sorted(kept.root.iterdir()) if kept.root.is_dir() else ():
        try:
            if (folder / "edgekit.json").exists() and read_manifest(folder).weights_sha256 == wanted:
                return NeutralWeights.open(folder)
        except EdgekitError:
            continue
    return _made_again(artifact, kept)


def _made_again(artifact: Artifact, store: Store) -> NeutralWeights:
    plan, cure = artifact.plan, "give the folder with --weights"
    try:
        source = open_source(plan.model_source, need_weights=True, offline=True)
    except EdgekitError as error:
        raise InvalidInput(f"{artifact.folder}: its neutral weights are not in the store; {cure} ({error})") from error
    made = neutral_weights(source, plan.recipe, store=store)
    if made.sha256 != artifact.manifest.weights_sha256:
        raise InvalidInput(f"{artifact.folder}: {plan.model_source} gives other weights now (calibrated?); {cure}")
    return made


def _whole(folder: Path) -> None:
    if not any(folder.iterdir()):
        raise InvalidInput(f"{folder}: is empty")
