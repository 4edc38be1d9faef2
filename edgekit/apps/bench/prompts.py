"""Prompts of workloads as token ids: made-up words from a seed, cut to an exact number of tokens.

The words are the same on every machine and for every tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from edgekit import Artifact, read_codec
from edgekit.apps.bench.workload import Case, PromptText, WorkloadRequest
from edgekit.errors import InvalidInput

Encode = Callable[[str, bool], list[int]]  # encode(text, begins_prompt)

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


def encoder_of(artifact: Artifact) -> Encode:
    """Return the artifact's tokenizer as a function; it adds special tokens only at the start of a prompt."""
    codec = read_codec(artifact.folder)

    def encode(text: str, begins: bool) -> list[int]:
        return codec.encode(text, add_special_tokens=begins)

    return encode


def of_user(request: WorkloadRequest, user: int) -> WorkloadRequest:
    """Return the request of one of several users: synthetic words at its end differ, the rest is shared."""
    last = request.prompt[-1]
    if user == 0 or last.synthetic is None:
        return request
    own = last.model_copy(update={"seed": last.seed + user * _SEEDS_A_USER})
    return request.model_copy(update={"prompt": (*request.prompt[:-1], own)})


def tokens_of(request: WorkloadRequest, encode: Encode, before: Sequence[int] = ()) -> list[int]:
    """Return the prompt's tokens; `before` are the tokens that it continues."""
    tokens = list(before)
    for part in request.prompt:
        tokens += _part_tokens(part, encode, begins=not tokens)
    if request.depth_tokens >= len(tokens):
        raise InvalidInput(
            f"depth_tokens {request.depth_tokens} leaves nothing to time of a prompt of {len(tokens)} tokens;"
            " lengthen the prompt"
        )
    return tokens


def prompts_of(case: Case, encode: Encode) -> list[tuple[int, list[int]]]:
    """Return the prompts of a case, each after the number of its tokens that come from the request before it.

    Those are zeros, because they are known only when it has been answered.
    """
    prompts: list[tuple[int, list[int]]] = []
    for place, request in enumerate(case.requests):
        before = len(prompts[-1][1]) + case.requests[place - 1].output_tokens if request.continues else 0
        prompts.append((before, tokens_of(request, encode, [0] * before)))
    return prompts


def _part_tokens(part: PromptText, encode: Encode, *, begins: bool) -> list[int]:
    if part.synthetic is None:
        assert part.text is not None, "files were read into the workload"
        tokens = encode(part.text, begins)
        if part.tokens is None:
            return tokens
        if not tokens:
            raise InvalidInput("a part of a prompt has no tokens; write more text")
        return (tokens * -(-part.tokens // len(tokens)))[: part.tokens]
    assert part.tokens is not None
    pieces = 1
    while True:
        tokens = encode(words(part.synthetic, part.seed, pieces), begins)
        if len(tokens) >= part.tokens:
            return tokens[: part.tokens]
        pieces = max(pieces + 1, pieces * part.tokens // max(1, len(tokens)) + 1)


def words(kind: str, seed: int, pieces: int) -> str:
    """Return synthetic prose or code; more pieces only append to it."""
    rng = random.Random(f"{kind} {seed}")
    return "".join(_code(rng) if kind == "code" else _prose(rng) for _ in range(pieces))


def _prose(rng: random.Random) -> str:
    sentences = []
    for _ in range(_WORDS_A_PIECE // 8):
        one, other, verb = rng.choice(_NOUNS), rng.choice(_NOUNS), rng.choice(_VERBS)
        sentences.append(f"The {one} {verb} a {other} {rng.choice(_PLACES)} {rng.choice(_WHENS)}.")
    return " ".join(sentences) + "\n\n"


def _code(rng: random.Random) -> str:
    name, one, other, call = (
        rng.choice(_CALLS),
        rng.choice(_NAMES),
        rng.choice(_NAMES),
        rng.choice(_CALLS),
    )
    return (
        f"def {name}_{one}({one}: int, {other}: list[int]) -> int:\n"
        f"    for value in {other}:\n"
        f"        if value > {rng.randrange(1000)}:\n"
        f"            {one} += {call}(value) * {rng.randrange(2, 99)}\n"
        f"    return {one}\n\n\n"
    )
