"""Everything between a text and its token ids: tokenizer, tokens that begin and end a text, chat template.

Two artifacts of one model must agree in all of it byte for byte, on every engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from edgekit import ChatTemplate, Codec, read_codec, read_eos, read_template
from edgekit.apps.bench.eval.evaluation import Check, CheckedProperty
from edgekit.errors import EdgekitError

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces, a tab\there, and\n\n\ttwo lines",
    'def f(x: int) -> str:\n    return f"{x:>8}"  # 12,345.67\n',
    "naïve façade — “quotes”, 日本語, Ελληνικά, עברית, 🙂👩‍💻",
    "<s></s><|endoftext|><|im_start|>[INST]",
)
_CHATS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"role": "user", "content": "Hello!"},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "  What is 2 + 2?\n"}),
    (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello. How can I help?"},
        {"role": "user", "content": "日本語 🙂"},
    ),
)


class TextInterface(NamedTuple):
    """The text interface of a model's or artifact's folder."""

    name: str
    codec: Codec
    template: ChatTemplate
    ends: frozenset[int]

    @staticmethod
    def of(folder: Path, eos: tuple[int, ...], name: str | None = None) -> TextInterface:
        return TextInterface(name or folder.name, read_codec(folder), read_template(folder), read_eos(folder, eos))

    def opening(self) -> list[int]:
        """Return the tokens that begin every text, usually one bos."""
        bare = self.codec.encode(PROBES[0], add_special_tokens=False)
        whole = self.codec.encode(PROBES[0], add_special_tokens=True)
        return whole[: len(whole) - len(bare)] if bare == whole[len(whole) - len(bare) :] else []

    def close(self) -> None:
        self.template.close()


def compare(one: TextInterface, other: TextInterface) -> list[Check]:
    """Compare all properties by which two folders may encode the same text differently."""
    return [_template(one, other), _tokens(one, other), _bos(one, other), _ends(one, other)]


def _check(what: CheckedProperty, difference: str) -> Check:
    return Check(what=what, same=not difference, detail=difference)


def _template(one: TextInterface, other: TextInterface) -> Check:
    for chat, (a, b) in enumerate(zip(_rendered(one), _rendered(other), strict=True)):
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return _check(
                "template",
                f"conversation {chat} becomes {a[place : place + 24]!r} in {one.name} and {b[place : place + 24]!r} in "
                f"{other.name} from character {place} on",
            )
    return _check("template", "")


def _rendered(interface: TextInterface) -> Iterator[str]:
    for chat in _CHATS:
        try:
            yield interface.template.render(chat) if interface.template.exists else "no template"
        except EdgekitError as error:
            yield f"refused: {error}"


def _tokens(one: TextInterface, other: TextInterface) -> Check:
    for probe in PROBES:
        a, b = (interface.codec.encode(probe, add_special_tokens=False) for interface in (one, other))
        if a != b:
            return _check("tokens", f"{probe[:24]!r} is {_short(a)} in {one.name} and {_short(b)} in {other.name}")
    return _check("tokens", "")


def _bos(one: TextInterface, other: TextInterface) -> Check:
    a, b = one.opening(), other.opening()
    if a == b:
        return _check("bos", "")
    return _check(
        "bos",
        f"a text begins with {_show_opening(one, a)} in {one.name} and with {_show_opening(other, b)} in {other.name}",
    )


def _show_opening(interface: TextInterface, tokens: list[int]) -> str:
    shown = interface.codec.decode(tokens, skip_special=False)
    return f"{tokens} ({shown!r})" if tokens else "nothing"


def _ends(one: TextInterface, other: TextInterface) -> Check:
    if one.ends == other.ends:
        return _check("end of text", "")
    a, b = sorted(one.ends), sorted(other.ends)
    return _check("end of text", f"a text ends at {a} in {one.name} and at {b} in {other.name}")


def _short(tokens: list[int]) -> str:
    digest = hashlib.sha256(str(tokens).encode()).hexdigest()[:8]
    return f"{len(tokens)} tokens {tokens[:6]}… ({digest})" if len(tokens) > 6 else str(tokens)
