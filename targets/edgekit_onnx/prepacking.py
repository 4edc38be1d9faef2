"""Packs the weights of an artifact for this CPU in a child process.

Packing takes private memory for all weights of a graph, so the process that opens the artifact would exceed its
predicted memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edgekit.common.files import write_file
from edgekit.errors import EdgekitError, TargetFailed
from edgekit_onnx.audit import CheckedGraph
from edgekit_onnx.data_file import DATA_FILE
from edgekit_onnx.float16_kv import BITS as HALF_BITS, halves_of, with_floats, with_halves
from edgekit_onnx.prepack_cache import align, probe, saving
from edgekit_onnx.sessions import PROVIDERS, open_graph, open_session, options

_LEAST_BYTES_PER_S = 1_000_000


def pack_apart(files: Path, threads: int, kv_bits: int, graphs: Sequence[CheckedGraph], folder: Path) -> None:
    """Write packed graphs into `folder`, in a child process, or here if the app cannot start Python."""
    said = _child(files, threads, kv_bits, graphs, folder)
    if said is None:
        pack(files, threads, kv_bits, graphs, folder)
    elif said:
        raise TargetFailed(said)


def time_limit_s(files: Path) -> int:
    """Return the limit for packing: a child that takes longer hangs, because slow SD cards write faster."""
    return 120 + (files / DATA_FILE).stat().st_size // _LEAST_BYTES_PER_S


def pack(files: Path, threads: int, kv_bits: int, graphs: Sequence[CheckedGraph], folder: Path) -> None:
    """Save each graph with packed weights, and check that it still gives the same bits.

    For an artifact with a cache of 16 bits, two graphs are saved: one for a cache of 32 bits, one for 16.
    """
    provider = PROVIDERS["cpu"]
    for graph in graphs:
        packed = folder / f"{graph.name}.onnx"
        data = with_floats(graph.data) if kv_bits == HALF_BITS else graph.data
        plain = probe(open_graph(files, data, provider, saving(options(threads), folder, graph.name)))
        align(packed)
        if not np.array_equal(plain, probe(open_session(packed, provider, options(threads)))):
            raise TargetFailed(f"onnx: {graph.name} gives other logits once its weights are packed")
        if kv_bits == HALF_BITS:
            write_file(folder / halves_of(graph.name), with_halves(packed.read_bytes()))


def _child(files: Path, threads: int, kv_bits: int, graphs: Sequence[CheckedGraph], folder: Path) -> str | None:
    """Pack in a child process. Returns an error message, empty on success; None if the child did not run or answer."""
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
        return f"onnx: packing the weights was ended after {limit_s:,} s; EDGEKIT_PACKED=off does not try again"
    if done.returncode < 0:
        return f"onnx: packing the weights was ended by signal {-done.returncode}; is there too little memory?"
    try:
        return str(json.loads(done.stdout)["failed"])
    except (ValueError, KeyError, TypeError):
        return None


def _main() -> None:
    files, folder, threads, kv_bits, *sizes = sys.argv[1:]
    graphs = []
    for name, size in (word.rsplit(":", 1) for word in sizes):
        graphs.append(CheckedGraph(name, sys.stdin.buffer.read(int(size))))
    failed = ""
    try:
        pack(Path(files), int(threads), int(kv_bits), graphs, Path(folder))
    except EdgekitError as error:
        failed = str(error)
    sys.stdout.write(json.dumps({"failed": failed}))


if __name__ == "__main__":
    _main()
