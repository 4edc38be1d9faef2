"""Measures what an installation fetches when it goes from one artifact to the next.

    python -m examples.benchmarks.delivery_figures updates OLD NEW [NEWER …]
    python -m examples.benchmarks.delivery_figures linears WEIGHTS --target onnx -l layers.0.self_attn.k_proj
    python -m examples.benchmarks.delivery_figures program EXECUTORCH_ARTIFACT --bytes 55296
    python -m examples.benchmarks.delivery_figures integers OLD_WEIGHTS NEW_WEIGHTS

`updates` pulls artifacts one after the other into one installation. `linears` packs neutral weights (`edgekit quantize`
writes them) as they are and with the rows of one linear reversed, and pulls the second beside the first. `program`
edits an ExecuTorch program in place, because lowering takes minutes: it reverses the first matrix of `--bytes` bytes
and its scales, and replaces their names, which are hashes of their bytes, everywhere. `integers` says how two neutral
weights of one model differ, and what the best possible delta of their integers would take.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import edgekit
from edgekit import plugins
from edgekit.apps import delivery
from edgekit.apps.delivery.site_index import manifest_name
from edgekit.artifact.artifact import Artifact, read_manifest, seal
from edgekit.common.files import file_sha256
from edgekit.common.sealed_json import to_sealed_json
from edgekit.common.staging import staging_for
from edgekit.contracts.neutral import MANIFEST, NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.model.source_files import companions

_NEAR_BYTES = 64  # equal bytes between two changed ones that count as changed
_FEWEST_BYTES = 1024  # a shorter stretch of changed bytes is no part of a linear: a name or a hash


def total_bytes(artifact: Path) -> int:
    return sum(fact.bytes for fact in read_manifest(artifact).manifest.files.values())


def updates(artifacts: Sequence[Path]) -> None:
    """Print a row for each artifact: what a pull of it fetches after those before it."""
    print("| artifact | its bytes | fetched | with the manifest | share |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        site, app = Path(place) / "site", Path(place) / "app"
        for number, artifact in enumerate(artifacts, 1):
            delivery.publish([artifact], site, release=str(number))
            pulled = delivery.pull(site.as_uri(), app, allow=["file"])
            total = total_bytes(artifact)
            fetched = pulled.fetched_bytes + (site / manifest_name(pulled.sha256)).stat().st_size
            print(f"| {artifact.name} | {total:,} | {pulled.fetched_bytes:,} | {fetched:,} | {fetched / total:.1%} |")


class LinearUpdate(NamedTuple):
    """The update of an artifact in which one linear changed."""

    own_bytes: int  # of the linear, as the artifact stores it
    fetched_bytes: int
    manifest_bytes: int

    @property
    def times_own(self) -> float:
        return (self.fetched_bytes + self.manifest_bytes) / self.own_bytes


def linears(folder: Path, targets: Sequence[str], names: Sequence[str]) -> None:
    """Print a row for each target and linear: the bytes of the linear, and those that a pull fetches."""
    print("| target | changed | its bytes | fetched | manifest | times its bytes |\n|---|---|---|---|---|---|")
    weights = NeutralWeights.open(folder)
    for target in targets:
        plan = edgekit.plan(folder, target=target, context=512, recipe=weights.recipe)
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            base = packed(plan, weights, Path(place, "base"))
            for name in names:
                with tempfile.TemporaryDirectory(dir=place) as trial:
                    own, fetched, manifest = found = update_of(name, plan, weights, base, Path(trial))
                row = f"| {target} | `{name}` | {own:,} | {fetched:,} | {manifest:,} | {found.times_own:.2f} |"
                print(row, flush=True)


def update_of(name: str, plan: Plan, weights: NeutralWeights, base: Artifact, folder: Path) -> LinearUpdate:
    """Change a linear of neutral weights, pack them, and pull the artifact beside `base`, which has the old ones."""
    changed = with_reversed_rows(weights, weights.model.prefix + name, folder / "weights")
    return pulled_beside(base, packed(plan, changed, folder / "new"), folder)


def pulled_beside(base: Artifact, new: Artifact, folder: Path) -> LinearUpdate:
    """Pull an artifact into a new installation that may copy from `base`."""
    delivery.publish([new.folder], folder / "site", release="1")
    pulled = delivery.pull((folder / "site").as_uri(), folder / "app", allow=["file"], reuse=[base.folder])
    manifest_bytes = (folder / "site" / manifest_name(pulled.sha256)).stat().st_size
    return LinearUpdate(changed_bytes(base, new), pulled.fetched_bytes, manifest_bytes)


def packed(plan: Plan, weights: NeutralWeights, final: Path) -> Artifact:
    """Pack weights as `export` does, without its self-check."""
    staging = staging_for(final, plan.estimate.disk_bytes)
    plugins.load_target(plan.target).export(plan, weights, staging, lambda done, total, what: None)
    for path in companions(weights.folder):
        if not (staging / path.name).exists():
            shutil.copyfile(path, staging / path.name)
    return seal(staging, final, plan, weights_sha256=weights.sha256, tools={}, self_check="none: made to be compared")


def programs(artifact: Path, sizes: Sequence[int]) -> None:
    """Print a row for each size: what a pull fetches after a matrix of that size changed in ExecuTorch's program."""
    print("| a matrix of bytes | its bytes | fetched | manifest | times its bytes |\n|---|---|---|---|---|")
    made = read_manifest(artifact)
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=artifact.parent) as place:
            base = _sealed_copy(made, Path(place, "base"), 0)
            new = _sealed_copy(made, Path(place, "new"), size)
            own, fetched, manifest = found = pulled_beside(base, new, Path(place))
        print(f"| {size:,} | {own:,} | {fetched:,} | {manifest:,} | {found.times_own:.2f} |", flush=True)


def _sealed_copy(artifact: Artifact, final: Path, reversed_bytes: int) -> Artifact:
    """Seal a copy of an artifact with the first matrix of `reversed_bytes` bytes in its program reversed; 0: none."""
    from edgekit_executorch.layout import PROGRAM

    staging = staging_for(final, 0)
    for name in artifact.manifest.files:
        shutil.copyfile(artifact.folder / name, staging / name)
    if reversed_bytes:
        reverse_matrix(staging / PROGRAM, reversed_bytes)
    made = artifact.manifest
    return seal(
        staging, final, made.plan, weights_sha256=made.weights_sha256, tools=made.tools, self_check=made.self_check
    )


def reverse_matrix(program: Path, size: int) -> None:
    """Reverse the bytes of the first matrix of `size` bytes and of its scales, and name them by their new hashes."""
    from edgekit_executorch.constants import Constants
    from edgekit_executorch.flatbuffer import sound

    with sound(program) as data:
        named = list(Constants(program, data).named.items())
        changed = bytearray(data)
    index = next(index for index, (_, place) in enumerate(named) if place.size == size)
    for name, place in named[index : index + 2]:
        stored = changed[place.start : place.start + place.size][::-1]
        changed[place.start : place.start + place.size] = stored
        digest = hashlib.sha256(stored).hexdigest().encode()
        changed = changed.replace(name[-len(digest) :].encode(), digest)
    program.write_bytes(changed)


def with_reversed_rows(weights: NeutralWeights, module: str, folder: Path) -> NeutralWeights:
    """Write a copy of neutral weights in which the rows of one matrix stand in reverse order."""
    shutil.copytree(weights.folder, folder)
    rows, files = weights.tensor_of(module).shape[0], dict(weights.manifest.files)
    for kind in ("weight_packed", "weight_scale"):
        place = weights.place(f"{module}.{kind}")
        path = folder / place.path.name
        stored = np.memmap(path, np.uint8, "r+", place.offset, (rows, place.length // rows))
        stored[:] = stored[::-1].copy()
        stored.flush()
        files[path.name] = files[path.name].model_copy(update={"sha256": file_sha256(path)})
    (folder / MANIFEST).write_bytes(to_sealed_json(weights.manifest.model_copy(update={"files": files})))
    return NeutralWeights.open(folder, verify=True)


def changed_bytes(old: Artifact, new: Artifact) -> int:
    """Return the bytes of the stretches in which the weights of two artifacts differ: their largest file."""
    name = max(new.manifest.files, key=lambda each: new.manifest.files[each].bytes)
    ours, theirs = (np.memmap(each.folder / name, np.uint8, "r") for each in (new, old))
    assert ours.size == theirs.size, f"{name}: has another size, so its stretches cannot be compared"
    places = np.flatnonzero(ours != theirs)
    ends = np.flatnonzero(np.diff(places) > _NEAR_BYTES)
    starts, stops = places[[0, *(ends + 1)]], places[[*ends, len(places) - 1]] + 1
    lengths = stops - starts
    return int(lengths[lengths >= _FEWEST_BYTES].sum())


def integers(old: Path, new: Path) -> None:
    """Print the share of integers and scales that differ, and the entropy of the differences, over all linears."""
    one, other = NeutralWeights.open(old), NeutralWeights.open(new)
    counts, scales, same_scales = np.zeros(511, np.int64), 0, 0
    for module in one.modules():
        if one.tensor_of(module).role != "linear":
            continue
        differences = one.integers(module).astype(np.int16) - other.integers(module)
        counts += np.bincount(differences.ravel() + 255, minlength=511)
        ours, theirs = one.scales(module), other.scales(module)
        scales, same_scales = scales + ours.size, same_scales + int((ours == theirs).sum())
    total = int(counts.sum())
    print(f"{total:,} integers, {1 - counts[255] / total:.1%} of them differ")
    print(f"{scales:,} scales, {1 - same_scales / scales:.1%} of them differ")
    print(f"entropy of the differences: {entropy_bits(counts):.2f} bits an integer")


def entropy_bits(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("updates").add_argument("artifacts", nargs="+", type=Path)
    linear = commands.add_parser("linears")
    linear.add_argument("weights", type=Path)
    linear.add_argument("--target", action="append", required=True)
    linear.add_argument("-l", "--linear", action="append", required=True)
    program = commands.add_parser("program")
    program.add_argument("artifact", type=Path)
    program.add_argument("--bytes", type=int, action="append", required=True)
    compared = commands.add_parser("integers")
    compared.add_argument("old", type=Path)
    compared.add_argument("new", type=Path)
    asked = parser.parse_args()
    if asked.command == "updates":
        updates(asked.artifacts)
    elif asked.command == "linears":
        linears(asked.weights, asked.target, asked.linear)
    elif asked.command == "program":
        programs(asked.artifact, asked.bytes)
    else:
        integers(asked.old, asked.new)


if __name__ == "__main__":
    main()
