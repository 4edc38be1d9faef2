"""Writes the logits that an onnx artifact's kernels give for held-out text, to be compared between processors.

    python -m examples.benchmarks.kernel_logits ARTIFACT OUT.npz [--windows 4] [--tokens 64] [--step 16] [--float]

Half of the windows are code and half prose. `--float` computes products with float activations, which int8 kernels
approximate. `tests/helpers/arm64.py` runs it on both sides of an emulator.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT
from numpy.typing import NDArray

from edgekit.artifact.artifact import open_artifact
from edgekit.contracts.feeding import feed
from edgekit.contracts.plan import Plan
from edgekit.runtime.generation.tokenizer import read_codec

TEXTS = ("code.txt", "prose.txt")


def windows_of(folder: Path, count: int, tokens: int) -> NDArray[np.int64]:
    """`count` windows of `tokens` ids each: in turn code and prose, from different places."""
    codec = read_codec(folder)
    held_out = Path(__file__).parent / "held_out"
    ids = [codec.encode((held_out / name).read_text(), add_special_tokens=False) for name in TEXTS]
    starts = [(len(ids[window % 2]) - tokens) * (window // 2) // max(1, (count + 1) // 2) for window in range(count)]
    return np.array([ids[window % 2][start : start + tokens] for window, start in enumerate(starts)])


def logits_of(plan: Plan, folder: Path, windows: NDArray[np.int64], step: int) -> NDArray[np.float32]:
    """Logits after every token, `step` tokens a call: one token runs in other kernels than several."""
    engine = OnnxEngine(plan, folder)
    try:
        found = []
        for window in windows.tolist():
            state = engine.start(plan.storage.model_copy(update={"capacity_tokens": len(window)}))
            found.append(feed(engine, state, window, len(window), chunk_tokens=step))
            state.close()
    finally:
        engine.close()
    return np.stack(found)


def with_float_activations(folder: Path, copy: Path) -> None:
    """Copy an artifact's graphs so that no product rounds its activations."""
    import onnx

    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("manifest.json"))
    for path in copy.glob("*.onnx"):
        graph = onnx.load_model(path, load_external_data=False)
        for node in graph.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = EXACT
        path.write_bytes(graph.SerializeToString())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step", type=int, default=16)
    parser.add_argument("--float", action="store_true", dest="is_float")
    chosen = parser.parse_args()
    artifact = open_artifact(chosen.artifact)
    windows = windows_of(artifact.folder, chosen.windows, chosen.tokens)
    with tempfile.TemporaryDirectory() as temporary:
        folder = artifact.folder
        if chosen.is_float:
            folder = Path(temporary) / "float"
            with_float_activations(artifact.folder, folder)
        np.savez(chosen.out, windows=windows, logits=logits_of(artifact.plan, folder, windows, chosen.step))


if __name__ == "__main__":
    main()
