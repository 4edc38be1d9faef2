"""Answers prompts with a native library in a separate process: two copies of ExecuTorch do not live in one process.

python tests/helpers/native_answers.py LIBRARY ARTIFACT OPERATORS is-exact|is-not < requests.json > answers.json
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manifests import change_manifest

import edgekit
from edgekit.apps.native.library import NativeLibrary, NativeModel

REPEATED = "".join(f"self.value_{number} = {number % 3}\n" for number in (1, 2, 3, 1, 2, 3, 1, 2))
# The last has several pieces of 64 tokens, which attend at once to a cache of 16 bits, and a piece of another size.
PROMPTS = (
    "import numpy as np", "class Größe 🙂:", REPEATED,
    "\n".join(f"value_{number} = {number * number}" for number in range(40)),
)  # fmt: skip
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0.0, "stop": ["= 9", "def"]},
)


def tokens_of(model: NativeModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=True)


def with_plan(artifact: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the artifact with a changed plan."""
    shutil.copytree(artifact, folder)
    change_manifest(folder / "manifest.json", lambda manifest: change(manifest["plan"]))
    return folder


def with_window(artifact: Path, folder: Path, **window: int) -> Path:
    """A copy of the artifact with a window in its plan."""

    def change(plan: dict[str, Any]) -> None:
        plan["cache"] = window
        plan["storage"]["capacity_tokens"] = window["window"]

    return with_plan(artifact, folder, change)


def compare(model: NativeModel, runtime: edgekit.Runtime, max_tokens: int, **more: float) -> tuple[int, int]:
    """Compare texts with Python's; return how many drafted tokens were accepted, and how many were cached."""
    accepted = cached = 0
    for seed, prompt in enumerate(PROMPTS):
        tokens = tokens_of(model, prompt)
        for options in OPTIONS:
            asked = {**options, "max_tokens": max_tokens, "seed": seed}
            python = runtime.generate(prompt, ignore_eos=True, **asked)
            if "reuses_prefix" in more:
                model.generate(tokens[:40], max_tokens=3)  # nothing is evicted of it, so it can be reused
            native = model.generate(tokens, ignores_ends=True, **asked, **more)
            assert (native.text, native.tokens) == (python.text, python.tokens), (prompt, asked, more)
            assert native.finish_reason == python.finish_reason
            accepted, cached = accepted + native.accepted_tokens, cached + native.cached_tokens
    return accepted, cached


def native_answers(
    library: Path, artifact: Path, requests: Sequence[Mapping[str, Any]], *, operators: str = "", exact: bool = False
) -> list[dict[str, Any]]:
    """Return the fields of the answers; each request has a prompt and options."""
    words = [sys.executable, __file__, str(library), str(artifact), operators, "is-exact" if exact else "is-not"]
    done = subprocess.run(words, input=json.dumps(requests), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def main(library: str, artifact: str, operators: str, exact: str) -> None:
    model = NativeLibrary(Path(library)).open(Path(artifact), runtime=operators, exact=exact == "is-exact")
    answers = []
    for request in json.load(sys.stdin):
        tokens = model.tokenizer.encode(request.pop("prompt"), add_special_tokens=True)
        answers.append(model.generate(tokens, **request)._asdict())
    model.close()
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
