"""Ask a running server for 16 tokens after each of a few prompts and compare them with edgekit's reference.

    python smoke_test.py [--url http://127.0.0.1:8000] [--key KEY]

Needs only Python. The reference decodes the same weights in float32. A server that computes in 16 bits may choose
another token if the reference's two best are nearly tied; the server is then asked to go on from the reference's text,
so that every token is compared. The test fails at a token that is no tie, if fewer than half of all tokens are equal,
and if the log probabilities of equal tokens differ too much on average.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

# (tokens before the answer, tokens to answer) → the server's answer
AskServer = Callable[[list[int], int], dict[str, Any]]


class PromptComparison:
    """The tokens of a prompt compared so far."""

    def __init__(self) -> None:
        self.equal = 0
        self.ties: list[float] = []  # margins of the reference where the server chose otherwise
        self.differences: list[float] = []  # of log probabilities of equal tokens
        self.failure: str | None = None

    def __str__(self) -> str:
        if self.failure is not None:
            return self.failure
        ties = ", ties of " + ", ".join(f"{tie:.3f}" for tie in self.ties) + " nats" if self.ties else ""
        far = f", log probabilities within {max(self.differences):.3f}" if self.differences else ""
        return f"{self.equal} of {self.equal + len(self.ties)} tokens equal{ties}{far}"


def send(url: str, key: str | None, request: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    call = urllib.request.Request(f"{url.rstrip('/')}/v1/completions", json.dumps(request).encode(), headers)
    with urllib.request.urlopen(call, timeout=600) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


def compare(ask: AskServer, prompt: list[int], steps: list[dict[str, Any]], tie: float) -> PromptComparison:
    """Compare every step of the reference with the server's choice after the same text."""
    found, place = PromptComparison(), 0
    while place < len(steps) and found.failure is None:
        before = [*prompt, *(step["token"] for step in steps[:place])]
        choice = ask(before, len(steps) - place)["choices"][0]
        if not isinstance(choice["text"], str):
            raise ValueError(f"the answer has no text: {str(choice)[:100]}")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        equal = equal_steps(choice["text"], [step["text"] for step in steps], place)
        for theirs, ours in zip(logprobs, steps[place : place + equal], strict=False):
            if theirs is not None:
                found.differences.append(abs(theirs - ours["log_probability"]))
        found.equal += equal
        place += equal
        if place == len(steps):
            break
        margin = steps[place]["margin"]
        if margin < tie:
            found.ties.append(margin)
        else:
            found.failure = (
                f"token {place + 1} is {margin:.2f} nats ahead: expected {steps[place]['text']!r}, the server goes on"
                f" with {choice['text']!r}"
            )
        place += 1
    return found


def equal_steps(text: str, expected: list[str], place: int) -> int:
    """Return the number of steps from `place` on whose texts a text begins with; the last one must end it."""
    start = expected[place - 1] if place else ""
    for count, step in enumerate(expected[place:]):
        rest = step.removeprefix(start).rstrip("\ufffd")  # of a character whose bytes are not all there
        is_last = place + count + 1 == len(expected)
        if not text.startswith(rest) or (is_last and text.rstrip("\ufffd") != rest):
            return count
    return len(expected) - place


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", help="sent as a bearer token")
    parser.add_argument("--reference", type=Path, default=Path(__file__).parent / "reference.json")
    given = parser.parse_args()
    reference = json.loads(given.reference.read_text())

    def ask(tokens: list[int], count: int) -> dict[str, Any]:
        request = {"model": reference["model"], "prompt": tokens, "max_tokens": count, "temperature": 0, "logprobs": 1}
        return send(given.url, given.key, request)

    every: list[PromptComparison] = []
    for case in reference["answers"]:
        try:
            found = compare(ask, case["prompt_tokens"], case["steps"], reference["tie"])
        except (OSError, LookupError, TypeError, ValueError) as error:
            detail = error.read().decode(errors="replace")[:300] if isinstance(error, urllib.error.HTTPError) else ""
            found = PromptComparison()
            found.failure = f"{type(error).__name__}: {error} {detail}"
        every.append(found)
        sys.stdout.write(f"{'FAIL' if found.failure else 'ok  '} {case['prompt'][:40]!r}: {found}\n")
    told = verdict(every, reference["mean_difference"])
    sys.stdout.write(f"{told}\n")
    return 1 if told.startswith("FAIL") else 0


def verdict(every: list[PromptComparison], most: float) -> str:
    """Return the line for all prompts together."""
    equal, ties = sum(each.equal for each in every), sum(len(each.ties) for each in every)
    differences = [one for each in every for one in each.differences]
    mean = sum(differences) / len(differences) if differences else 0.0
    told = f"{equal} tokens equal, {ties} ties, log probabilities {mean:.4f} apart on average (allowed {most:g})"
    if any(each.failure for each in every):
        return f"FAIL {told}"
    if equal <= ties:
        return f"FAIL {told}: nearly every token is a tie, which is no evidence"
    return f"FAIL {told}: the weights, or the arithmetic, are others" if mean > most else f"ok   {told}"


if __name__ == "__main__":
    sys.exit(main())
