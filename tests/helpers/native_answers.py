"""Answers prompts with a native library in a process of its own: two copies of ExecuTorch do not live in one process.

python tests/helpers/native_answers.py LIBRARY ARTIFACT OPERATORS is-exact|is-not < requests.json > answers.json
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgekit.apps.native.library import NativeLibrary, NativeModel


def tokens_of(model: NativeModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=True)


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
