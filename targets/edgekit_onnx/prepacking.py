"""Packs the weights of an artifact for this CPU in a child process.

onnxruntime packs weights into private memory when it opens a graph. Saved once in that form, they are mapped from disk
as clean pages that processes share. The original bytes must stay in the file, because onnxruntime compares with them.
Packing takes private memory for all weights of a graph, so the process that opens the artifact would exceed its
predicted memory.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.common.files import write_file
from edgekit.common.packed_weights import time_limit_s
from edgekit.errors import EdgekitError, TargetFailed
from edgekit_onnx.audit import CheckedGraph
from edgekit_onnx.data_file import DATA_FILE
from edgekit_onnx.float16_kv import BITS as HALF_BITS, halves_of, with_floats, with_halves
from edgekit_onnx.sessions import PROVIDERS, open_graph, open_session, options

_ALIGNMENT = 64  # alignment of packed memory, on which its layout depends
_EXTERNAL = "session.optimized_model_external_initializers"


def pack_apart(files: Path, threads: int, kv_bits: int, graphs: Sequence[CheckedGraph], folder: Path) -> None:
    """Write packed graphs into `folder`, in a child process, or here if the app cannot start Python."""
    said = _child(files, threads, kv_bits, graphs, folder)
    if said is None:
        pack(files, threads, kv_bits, graphs, folder)
    elif said:
        raise TargetFailed(said)


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


def saving(chosen: Any, folder: Path, name: str) -> Any:
    """Return session options that also save the graph with its packed weights."""
    chosen.optimized_model_filepath = str(folder / f"{name}.onnx")
    chosen.add_session_config_entry(f"{_EXTERNAL}_file_name", f"{name}.bin")
    # onnxruntime 1.31.1 corrupts scales inside the graph if their weights are outside, so all but the smallest
    # initializers go outside. Shapes for Reshape must stay inside, or the saved graph does not open.
    chosen.add_session_config_entry(f"{_EXTERNAL}_min_size_in_bytes", str(_ALIGNMENT))
    chosen.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    return chosen


def align(path: Path) -> None:
    """Rewrite the data file of a saved graph so that every piece starts at a multiple of 64 bytes.

    onnxruntime writes pieces one after another. A vocabulary that is no multiple of 16 shifts the pieces after it,
    and packed weights that are mapped at another alignment than they were made for are read wrongly.
    """
    import onnx

    model = onnx.load_model(path, load_external_data=False)
    external = [tensor for tensor in model.graph.initializer if tensor.external_data]
    entries = [{entry.key: entry for entry in tensor.external_data} for tensor in external]
    packed = [entry for each in entries for key, entry in each.items() if key.startswith("prepacked")]
    if all(int(part.split(";")[0]) % _ALIGNMENT == 0 for entry in packed for part in entry.value.split("|")[1:]):
        return
    data = path.with_suffix(".bin")
    aligned = data.with_suffix(".aligned")
    with data.open("rb") as source, aligned.open("wb") as target:

        def move(offset: int, length: int) -> str:
            target.write(bytes(-target.tell() % _ALIGNMENT))
            start = target.tell()
            source.seek(offset)
            while length:
                block = source.read(min(length, 1 << 20))
                if not block:
                    raise _not_whole()
                target.write(block)
                length -= len(block)
            return str(start)

        for each in entries:
            each["offset"].value = move(int(each["offset"].value), int(each["length"].value))
        for entry in packed:
            name, *parts = entry.value.split("|")
            pieces = [part.split(";") for part in parts]
            moved = [[move(int(offset), int(length)), length, *rest] for offset, length, *rest in pieces]
            entry.value = "|".join([name, *(";".join(piece) for piece in moved)])
    aligned.replace(data)
    write_file(path, model.SerializeToString())


def probe(session: Any) -> NDArray[Any]:
    """Run a graph on a few fixed tokens or hidden states; equal graphs give equal bits."""
    tokens, capacity = 3, 4
    fed: dict[str, NDArray[Any]] = {
        "input_ids": np.arange(tokens, dtype=np.int64)[None],
        "types": np.zeros((1, tokens), np.int64),
        "positions": np.arange(tokens, dtype=np.int64),
        "lengths": np.array([tokens], np.int32),
        "seqlens_k": np.array([tokens - 1], np.int32),
        "total": np.array(tokens, np.int32),
        "kept": np.array([tokens], np.int64),
    }
    for name, kind, shape in ((value.name, value.type, value.shape) for value in session.get_inputs()):
        if name.startswith("mask."):
            fed[name] = np.zeros((1, 1, tokens, tokens), np.float32)
        elif name == "hidden_in":
            sizes = (1, tokens, shape[-1])[-len(shape) :]
            fed[name] = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
        elif name.endswith((".inputs", ".memory")):
            fed[name] = np.zeros((1, *shape[1:]), np.float32)
        elif name not in fed:
            numbers = np.float16 if kind == "tensor(float16)" else np.float32
            fed[name] = np.zeros((1, shape[1], capacity, shape[3]), numbers)
    # Compare the last output, since the first layer's keys do not depend on later layers.
    last = next(value.name for value in session.get_outputs() if value.name in ("hidden", "logits"))
    result: NDArray[Any] = session.run([last], {value.name: fed[value.name] for value in session.get_inputs()})[0]
    return result


def _not_whole() -> OSError:
    return OSError(errno.ENOSPC, "the saved weights are not whole; is the disk full?")


def refuse_short(path: Path) -> None:
    """Raise `OSError` if a graph's data file is cut short, because onnxruntime does not notice a full disk."""
    import onnx

    graph = onnx.load_model(path, load_external_data=False).graph
    for tensor in graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            end = int(entries["offset"]) + int(entries["length"])
            if (path.parent / entries["location"]).stat().st_size < end:
                raise _not_whole()


def _child(files: Path, threads: int, kv_bits: int, graphs: Sequence[CheckedGraph], folder: Path) -> str | None:
    """Pack in a child process. Returns an error message, empty on success; None if the child did not run or answer."""
    if getattr(sys, "frozen", False) or not sys.executable:
        return None
    limit_s = time_limit_s((files / DATA_FILE).stat().st_size)
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
