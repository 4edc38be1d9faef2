"""Ask a running server for a few tokens and compare them with edgekit's reference.

    python smoke_test.py [--url http://127.0.0.1:8000] [--key KEY]

Needs only Python. The reference decodes the same weights in float32. A server that computes in 16 bits may choose
another token if the reference's two best are nearly tied; the comparison of that prompt ends there. Ties are more
frequent with inputs of 8 bits, because small differences change how they round.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def ask(url: str, key: str | None, request: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    call = urllib.request.Request(f"{url.rstrip('/')}/v1/completions", json.dumps(request).encode(), headers)
    with urllib.request.urlopen(call, timeout=600) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


def compare(answer: dict[str, Any], steps: list[dict[str, Any]], tie: float) -> tuple[bool, str]:
    """Return whether the answer equals the reference up to a tie of at most `tie` nats, and a description."""
    choice = answer["choices"][0]
    text = choice["text"]
    for place, step in enumerate(steps):
        if text.startswith(step["text"]):
            continue
        if step["margin"] < tie:
            return True, f"{place} tokens equal, then a tie of {step['margin']:.3f} nats"
        return False, f"token {place + 1}: expected {step['text']!r}, the server says {text!r}"
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    far = [
        abs(theirs - ours["log_probability"])
        for theirs, ours in zip(logprobs, steps, strict=False)
        if theirs is not None
    ]
    beside = f", log probabilities within {max(far):.3f}" if far else ""
    return True, f"all {len(steps)} tokens equal{beside}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", help="sent as a bearer token")
    parser.add_argument("--reference", type=Path, default=Path(__file__).parent / "reference.json")
    given = parser.parse_args()
    reference = json.loads(given.reference.read_text())
    failed = 0
    for case in reference["answers"]:
        request = {
            "model": reference["model"],
            "prompt": case["prompt_tokens"],
            "max_tokens": len(case["steps"]),
            "temperature": 0,
            "logprobs": 1,
        }
        try:
            passed, found = compare(ask(given.url, given.key, request), case["steps"], reference["tie"])
        except (OSError, KeyError, ValueError) as error:
            detail = error.read().decode(errors="replace")[:300] if isinstance(error, urllib.error.HTTPError) else ""
            passed, found = False, f"{type(error).__name__}: {error} {detail}"
        failed += not passed
        sys.stdout.write(f"{'ok  ' if passed else 'FAIL'} {case['prompt'][:40]!r}: {found}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
