"""Peers as subjects of a benchmark: the artifact's own integers, written for another engine."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from edgekit import Artifact, NeutralWeights, Recipe, open_source, quantize, write_gguf
from edgekit.apps.bench.artifact_subjects import formats_of
from edgekit.apps.bench.measurement import SubjectInfo
from edgekit.apps.bench.peers import folders
from edgekit.apps.bench.prompts import encoder_of
from edgekit.apps.bench.subject import Subject
from edgekit.common.content_store import ContentStore, Hold
from edgekit.common.files import home
from edgekit.contracts.neutral import find_weights, is_neutral, weights_store
from edgekit.contracts.plan import MemoryFacts
from edgekit.contracts.recipe import Format, Rule
from edgekit.contracts.token_costs import touched_weight_bytes
from edgekit.errors import EdgekitError, InvalidInput, UnknownName

_WRITER = 2  # raise it when the same weights give other files
_HOLDS: list[Hold] = []  # of written folders: processes open them until this one ends
_PROGRAM = Path(__file__).with_name("program.py")


class Peer(NamedTuple):
    """Another engine: the writer of its files, and the formats that it stores."""

    file: str  # the file that it opens in the written folder; "" for the folder itself
    write: Callable[[NeutralWeights, Path, int], None]
    stores: Callable[[Recipe], Recipe]  # the recipe as the peer stores it
    memory: MemoryFacts
    needs: str  # the packages to install


def _in_blocks(recipe: Recipe) -> Recipe:
    rules = tuple(
        rule.model_copy(update={"format": Format(kind="s4", group=32)}) if rule.format.kind == "s4" else rule
        for rule in recipe.rules
    )
    return recipe.model_copy(update={"rules": rules})


def _float_ends(recipe: Recipe) -> Recipe:
    float32 = Format(kind="float32")
    ends = tuple(Rule(pattern=pattern, format=float32) for pattern in ("*embed_tokens*", "*lm_head"))
    return recipe.model_copy(update={"rules": ends + recipe.rules, "float_format": float32})


_layout = partial(MemoryFacts, runtime_bytes=0, source="the layout that is written for it")
PEERS: dict[str, Peer] = {
    "llama.cpp": Peer(
        "model.gguf",
        lambda weights, folder, context: write_gguf(weights, folder / "model.gguf", context),
        _in_blocks, _layout(row_group=32), "llama-cpp-python",
    ),
    "onnxruntime-genai": Peer(
        "", lambda weights, folder, context: folders.write_olive(weights, folder),
        _float_ends, _layout(scale_bits=32), "onnxruntime-genai",
    ),
    "mlx-lm": Peer(
        "", lambda weights, folder, context: folders.write_mlx(weights, folder),
        lambda recipe: recipe, _layout(scale_bits=32, bias_bits=32, row_group=128, float_bits=32), "mlx-lm",
    ),
}  # fmt: skip


def peer_of(
    name: str,
    artifact: Artifact,
    weights: NeutralWeights,
    *,
    context: int,
    python: str | None = None,
    store: ContentStore | None = None,
) -> Subject:
    """Return the subject of a peer on an artifact's weights; the peer's files are written once and cached."""
    peer = known_peer(name)
    key = hashlib.sha256(f"{_WRITER} {name} {weights.sha256} {context}".encode()).hexdigest()
    folder, hold = (store or ContentStore(home() / "peers")).hold(
        key, lambda folder: peer.write(weights, folder, context), _whole
    )
    _HOLDS.append(hold)
    recipe = peer.stores(weights.recipe)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    plan = artifact.plan
    return Subject(
        info=SubjectInfo(
            name=name,
            engine=name,
            engine_version="",
            model=weights.model.name,
            recipe=weights.recipe.name,
            formats=formats_of(weights.model, recipe, size),
            weights_sha256=weights.sha256,
            threads=plan.threads,
            context=context,
            kv_bits=0,
        ),
        command=(python or sys.executable, str(_PROGRAM), name),
        opening={
            "files": str(folder / peer.file),
            "context": context,
            "threads": plan.threads,
        },
        weight_bytes=touched_weight_bytes(weights.model, recipe, peer.memory),
        model=plan.model,
        encode=encoder_of(artifact),
        fix=f"pip install {peer.needs}, or name a Python that has it with --peer-python",
    )


def known_peer(name: str) -> Peer:
    if name not in PEERS:
        raise UnknownName("peer", name, PEERS)
    return PEERS[name]


def weights_of(artifact: Artifact, store: ContentStore | None = None) -> NeutralWeights:
    """Return the neutral weights of an artifact, from the store or quantised again."""
    stored = store or weights_store()
    return find_weights(stored, artifact.manifest.weights_sha256) or _make_again(artifact, stored)


def _make_again(artifact: Artifact, store: ContentStore) -> NeutralWeights:
    plan, fix = artifact.plan, "export it again, which keeps them there"
    try:
        source = open_source(artifact.made_of, need_weights=True, offline=True)
    except EdgekitError as error:
        raise InvalidInput(f"{artifact.folder}: its neutral weights are not in the store; {fix} ({error})") from error
    if is_neutral(source.folder):
        weights = NeutralWeights.open(source.folder)
    else:
        with TemporaryDirectory() as copied:
            place = Path(copied) / "weights"
            weights = quantize(artifact.made_of, plan.recipe, place, effort="quick", store=store.root)
    if weights.sha256 != artifact.manifest.weights_sha256:
        raise InvalidInput(f"{artifact.folder}: {artifact.made_of} now gives different weights (calibrated?); {fix}")
    return weights


def _whole(folder: Path) -> None:
    if not any(folder.iterdir()):
        raise InvalidInput(f"{folder}: is empty")
