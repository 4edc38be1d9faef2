"""Damaged tokenizers and manifests for the native library, thousands a second: a loop of C++ with sanitizers.

    python tests/helpers/native_fuzzing.py [--count 1000000] [--first 0] [--kind tokenizer|manifest] [--plain]

Each is opened, or refused in one line within a second. Cases have numbers: `--first` goes on where a run was stopped,
and a case that fails is shown with its number and its file. `native_formats.py` damages the other formats, and compares
what the two languages refuse.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import fuzzing
import tiny_models
from native_tokenizers import MADE

from edgekit.apps.native.build import SOURCES, run as run_tool
from edgekit.artifact.artifact import MANIFEST

ROOT = Path(__file__).parents[2]
SLICE = 50_000  # cases of a process
KINDS = (
    "byte level", "digits", "llama 2", "llama 3", "qwen", "gemma split", "prefixed", "metaspace first False",
    "isolated True regex",
)  # fmt: skip
FILES = {"tokenizer.json": b"{}", "weights.bin": b"0123456789" * 10, "a/b.bin": b""}
SANITIZERS = {
    "ASAN_OPTIONS": "detect_leaks=1:max_allocation_size_mb=256:quarantine_size_mb=8",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class CaseFailed(Exception):
    """A damaged file that is neither opened nor refused in one line."""


class Counts(NamedTuple):
    opened: int
    refused: int
    reasons: int  # different refusals, at most in a process
    slowest_ms: int


def compiled(*, sanitize: bool) -> Path:
    """The fuzzer over the library's sources; what changed since is compiled again."""
    folder = ROOT / "build" / ("native-fuzzer-sanitized" if sanitize else "native-fuzzer")
    options = ["-DBUILD_SHARED_LIBS=OFF", f"-DSANITIZE={'ON' if sanitize else 'OFF'}"]
    run_tool("cmake", "-S", SOURCES, "-B", folder, *options)
    run_tool("cmake", "--build", folder, "--parallel", os.cpu_count() or 1)
    flags = ["-std=c++17", "-O1", "-g", f"-I{SOURCES / 'src'}"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if sanitize else []
    program, source = folder / "fuzzer", Path(__file__).with_name("native_fuzzer.cpp")
    libraries = [folder / "libedgekit_native.a", "-lpthread", "-ldl"]
    run_tool(os.environ.get("CXX", "c++"), *flags, source, *libraries, "-o", program)
    return program


def write_tokenizers(folder: Path) -> list[Path]:
    paths = [folder / f"{place}.json" for place in range(len(KINDS))]
    for path, name in zip(paths, KINDS, strict=True):
        path.write_text(MADE[name]().to_str())
    return paths


def write_manifests(folder: Path) -> list[Path]:
    """The folder of an artifact, and manifests for it: with a whole cache, and with a window and an 8-bit cache."""
    model = tiny_models.write_tiny(folder / "tiny", layers=1)
    made = tiny_models.artifact_of(model, folder / "a.edgekit", context=64)
    manifest = json.loads((made / MANIFEST).read_bytes())
    del manifest["seal"]
    small = folder / "small.edgekit"
    facts: dict[str, Any] = {}
    for name, data in FILES.items():
        (small / name).parent.mkdir(parents=True, exist_ok=True)
        (small / name).write_bytes(data)
        facts[name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    halves = [FILES["weights.bin"][:50]] * 2
    facts["weights.bin"]["chunks"] = [{"bytes": len(part), "sha256": sha256(part).hexdigest()} for part in halves]
    window = {"window": 32, "sinks": 4, "block": 5}
    plans = [
        manifest["plan"],
        {
            **manifest["plan"],
            "cache": window,
            "storage": {**manifest["plan"]["storage"], "kv_bits": 8, "capacity_tokens": 32},
        },
    ]
    paths = [folder / f"{place}.json" for place in range(len(plans))]
    for path, plan in zip(paths, plans, strict=True):
        path.write_text(json.dumps({**manifest, "files": facts, "plan": plan}, indent=1) + "\n")
    return [small, *paths]


WRITERS: dict[str, Callable[[Path], list[Path]]] = {"tokenizer": write_tokenizers, "manifest": write_manifests}


def fuzz(program: Path, kind: str, files: list[Path], first: int, count: int) -> Counts:
    """Read the cases `first` to `first + count`; raise `CaseFailed` with the path of the first that fails."""
    note = files[0].parent / "note"
    words = [str(program), str(note), str(first), str(count), kind, *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=os.environ | SANITIZERS)
    if done.returncode == 0:
        return Counts(*map(int, done.stdout.split()))
    number = int.from_bytes(note.read_bytes(), "little")
    words[2:4] = [str(number), "0"]
    kept = Path(tempfile.gettempdir()) / f"failed-{kind}-{number}.json"
    kept.write_bytes(subprocess.run(words, capture_output=True, env=os.environ | SANITIZERS).stdout)
    raise CaseFailed(f"{kind} {number}, {kept}, status {done.returncode}: {done.stderr[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000, help="damaged files of each kind")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=list(WRITERS), action="append")
    parser.add_argument("--plain", action="store_true", help="without sanitizers")
    chosen = parser.parse_args()
    program = compiled(sanitize=not chosen.plain)
    for kind in chosen.kind or WRITERS:
        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            files, began, sum_of = WRITERS[kind](folder), perf_counter(), [0, 0, 0, 0]
            for first in range(chosen.first, chosen.first + chosen.count, SLICE):
                counts = fuzz(program, kind, files, first, min(SLICE, chosen.first + chosen.count - first))
                sum_of = [sum_of[0] + counts[0], sum_of[1] + counts[1], *map(max, sum_of[2:], counts[2:])]
                done, took = sum_of[0] + sum_of[1], perf_counter() - began
                total = Counts(*sum_of)
                fuzzing.say(f"{kind}: {done:,} from {chosen.first:,}, {done / took:,.0f} a second: {total._asdict()}")
        finally:
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CaseFailed as failure:
        sys.exit(f"failed: {failure}")
