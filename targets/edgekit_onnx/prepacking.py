"""Packs the weights of an artifact for this CPU in child processes.

Packing takes private memory for all weights of a graph, so the process that opens the artifact would exceed its
predicted memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgekit.common.files import write_file
from edgekit.common.free_memory import free_memory
from edgekit.errors import EdgekitError, TargetFailed
from edgekit_onnx.audit import Checked
from edgekit_onnx.data_file import DATA_FILE
from edgekit_onnx.float16_kv import BITS as HALF_BITS
from edgekit_onnx.float16_kv import halves_of, with_floats, with_halves
from edgekit_onnx.prepack_cache import LARGE_BYTES, align, packing_bytes, probe, saving, synced_hash
from edgekit_onnx.sessions import PROVIDERS, open_beside, open_session, options

_LEAST_BYTES_PER_S = 1_000_000


class _Answer(NamedTuple):
    """What a child process reports: an error message, or the hashes of its files."""

    failed: str
    hashes: dict[str, str]


def pack_apart(files: Path, threads: int, kv_bits: int, graphs: Sequence[Checked], folder: Path) -> dict[str, str]:
    """Write packed graphs into `folder`, in child processes, or here if the app cannot start Python.

    Returns the hashes of the files.
    """
    together = _processes(files, threads, len(graphs))
    shares = [graphs[start::together] for start in range(together)]
    with ThreadPoolExecutor(together) as pool:
        answers = list(pool.map(lambda share: _child(files, threads, kv_bits, share, folder), shares))
    hashes: dict[str, str] = {}
    for answer in answers:
        if answer is None:
            return pack(files, threads, kv_bits, graphs, folder)
        if answer.failed:
            raise TargetFailed(answer.failed)
        hashes |= answer.hashes
    return hashes


def _processes(files: Path, threads: int, graphs: int) -> int:
    """Return how many processes pack at once: as many as compute later, if there is memory for them.

    onnxruntime packs and writes a graph on one thread. Starting a process takes longer than packing a small model.
    """
    weights, memory = (files / DATA_FILE).stat().st_size, free_memory()
    if weights < LARGE_BYTES or memory is None:
        return 1
    return max(1, min(threads, graphs, memory.bytes // packing_bytes(weights)))


def time_limit_s(files: Path) -> int:
    """Return the limit for packing: a child that takes longer hangs, because slow SD cards write faster."""
    return 120 + (files / DATA_FILE).stat().st_size // _LEAST_BYTES_PER_S


def pack(files: Path, threads: int, kv_bits: int, graphs: Sequence[Checked], folder: Path) -> dict[str, str]:
    """Save each graph with packed weights, and check that it still gives the same bits. Returns the files' hashes.

    Of an artifact with a cache of 16 bits, the graph is saved with one of 32, and the graph for 16 beside it.
    """
    provider = PROVIDERS["cpu"]
    hashes: dict[str, str] = {}
    for graph in graphs:
        packed = folder / f"{graph.name}.onnx"
        data = with_floats(graph.data) if kv_bits == HALF_BITS else graph.data
        plain = probe(open_beside(files, data, provider, saving(options(threads), folder, graph.name)))
        align(packed)
        if not np.array_equal(plain, probe(open_session(packed, provider, options(threads)))):
            raise TargetFailed(f"onnx: {graph.name} gives other logits once its weights are packed")
        if kv_bits == HALF_BITS:
            write_file(folder / halves_of(graph.name), with_halves(packed.read_bytes()))
        hashes |= {path.name: synced_hash(path) for path in folder.glob(f"*{graph.name}.*")}
    return hashes


def _child(files: Path, threads: int, kv_bits: int, graphs: Sequence[Checked], folder: Path) -> _Answer | None:
    """Pack in a child process. Returns its answer; None if it did not run or answer."""
    if getattr(sys, "frozen", False) or not sys.executable:
        return None
    limit_s = time_limit_s(files)
    sizes = [f"{graph.name}:{len(graph.data)}" for graph in graphs]
    places = [str(files.resolve()), str(folder.resolve())]
    command = [sys.executable, "-P", "-m", __name__, *places, str(threads), str(kv_bits), *sizes]
    try:
        # Pass the audited graphs, since their files may have changed.
        data = b"".join(graph.data for graph in graphs)
        done = subprocess.run(command, input=data, capture_output=True, check=False, timeout=limit_s)
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        failed = f"onnx: packing the weights was ended after {limit_s:,} s; EDGEKIT_PACKED=off does not try again"
        return _Answer(failed, {})
    if done.returncode < 0:
        failed = f"onnx: packing the weights was ended by signal {-done.returncode}; is there too little memory?"
        return _Answer(failed, {})
    try:
        return _Answer(**json.loads(done.stdout))
    except (ValueError, KeyError, TypeError):
        return None


def _main() -> None:
    files, folder, threads, kv_bits, *sizes = sys.argv[1:]
    graphs = []
    for name, size in (word.rsplit(":", 1) for word in sizes):
        graphs.append(Checked(name, sys.stdin.buffer.read(int(size))))
    failed, hashes = "", {}
    try:
        hashes = pack(Path(files), int(threads), int(kv_bits), graphs, Path(folder))
    except EdgekitError as error:
        failed = str(error)
    sys.stdout.write(json.dumps(_Answer(failed, hashes)._asdict()))


if __name__ == "__main__":
    _main()
