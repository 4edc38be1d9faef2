"""Workloads as token ids: made-up words from a seed, cut to exactly as many tokens as were asked for.

The words are the same on every machine and for every tokenizer; the tokens are those of the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from edgekit.errors import InvalidInput
from edgekit.measure.workload import Request, Text

Encode = Callable[[str, bool], list[int]]  # text, whether it begins the prompt → tokens

_NOUNS = (
    "harbour", "letter", "engine", "garden", "window", "market", "teacher", "river", "signal", "winter", "bridge",
    "kitchen", "mountain", "paper", "lamp",
)  # fmt: skip
_VERBS = (
    "keeps", "finds", "repairs", "remembers", "follows", "measures", "answers", "carries", "opens", "watches", "counts",
    "leaves",
)  # fmt: skip
_PLACES = ("near the station", "behind the old mill", "on the island", "at the edge of town", "under the bridge")
_WHENS = ("before sunrise", "every second week", "when the rain stops", "after the long meeting", "in late autumn")
_NAMES = ("index", "total", "buffer", "session", "weight", "result", "entry", "cursor", "limit", "offset", "branch")
_CALLS = ("append", "update", "resolve", "measure", "collect", "release", "decode", "validate")
_WORDS_A_PIECE = 64
_SEEDS_A_USER = 1 << 20


def of_user(request: Request, user: int) -> Request:
    """The request as one of several users makes it: made-up words at its end are others, the rest is shared."""
    last = request.prompt[-1]
    if user == 0 or last.synthetic is None:
        return request
    own = last.model_copy(update={"seed": last.seed + user * _SEEDS_A_USER})
    return request.model_copy(update={"prompt": (*request.prompt[:-1], own)})


def tokens_of(request: Request, encode: Encode, before: Sequence[int] = ()) -> list[int]:
    """The prompt of a request; `before` is what it goes on from."""
    found = list(before)
    for part in request.prompt:
        found += _part_tokens(part, encode, begins=not found)
    if request.depth_tokens >= len(found):
        raise InvalidInput(
            f"depth_tokens {request.depth_tokens} leaves nothing of a prompt of {len(found)} tokens; lengthen it"
        )
    return found


def _part_tokens(part: Text, encode: Encode, *, begins: bool) -> list[int]:
    if part.synthetic is None:
        assert part.text is not None, "files were read into the workload"
        tokens = encode(part.text, begins)
        if part.tokens is None:
            return tokens
        if not tokens:
            raise InvalidInput("a part of a prompt gives no token at all; write more text")
        return (tokens * -(-part.tokens // len(tokens)))[: part.tokens]
    assert part.tokens is not None
    pieces = 1
    while True:
        tokens = encode(words(part.synthetic, part.seed, pieces), begins)
        if len(tokens) >= part.tokens:
            return tokens[: part.tokens]
        pieces = max(pieces + 1, pieces * part.tokens // max(1, len(tokens)) + 1)


def words(kind: str, seed: int, pieces: int) -> str:
    """Made-up prose or code; more pieces only lengthen it at its end."""
    draw = random.Random(f"{kind} {seed}")
    return "".join(_code(draw) if kind == "code" else _prose(draw) for _ in range(pieces))


def _prose(draw: random.Random) -> str:
    sentences = []
    for _ in range(_WORDS_A_PIECE // 8):
        one, other, verb = draw.choice(_NOUNS), draw.choice(_NOUNS), draw.choice(_VERBS)
        sentences.append(f"The {one} {verb} a {other} {draw.choice(_PLACES)} {draw.choice(_WHENS)}.")
    return " ".join(sentences) + "\n\n"


def _code(draw: random.Random) -> str:
    name, one, other, call = draw.choice(_CALLS), draw.choice(_NAMES), draw.choice(_NAMES), draw.choice(_CALLS)
    return (
        f"def {name}_{one}({one}: int, {other}: list[int]) -> int:\n"
        f"    for value in {other}:\n"
        f"        if value > {draw.randrange(1000)}:\n"
        f"            {one} += {call}(value) * {draw.randrange(2, 99)}\n"
        f"    return {one}\n\n\n"
    )
