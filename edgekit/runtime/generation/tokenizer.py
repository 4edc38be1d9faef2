"""Encode and decode text with the `tokenizers` library. Streamed text equals the decoding of all tokens at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from edgekit.common.footprint import return_unused
from edgekit.common.parsing import read_bytes, read_json
from edgekit.errors import ContextExceeded, InvalidInput, vendor_errors
from edgekit.model.tokenizer_file import MAX_TOKENIZER_BYTES, load_tokenizer

if TYPE_CHECKING:
    from edgekit.runtime.budget_share import BudgetShare

Result = TypeVar("Result")
MAX_TEXT_BYTES = 16 << 20
ENDLESS_TOKENS = 64 << 10  # most tokens of a text prompt that is read through a window
SHORTEN = "shorten it, open with a window, or export a larger context"
_AT_ONCE = 32 << 10  # characters: 14 ms, and up to 9 MB
_TOKEN_BYTES = 16  # of a text as long as the context; English has 4 to 5 bytes a token
_CUT_TOKENS = 16  # tokens that a cut between two slices adds at most
_BYTES_A_BYTE = 300  # memory that a text takes while it is tokenised: 95 to 285 were measured
_REPLACEMENT = "\ufffd"
_MOST_PENDING = 4  # tokens of one incomplete character
_BLANK_CONTEXT = 16  # tokens
# Decoders whose text only grows at its end, apart from incomplete characters. With others, text comes at the end.
_APPEND_ONLY = {"ByteLevel", "Metaspace", "BPEDecoder", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip"}

# GPT-2's alphabet: each byte as one visible character; those without one come after U+0100.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + place): byte for place, byte in enumerate(_HIDDEN)}


class Codec:
    """The tokenizer that a `tokenizer.json` describes."""

    def __init__(self, data: bytes, where: str) -> None:
        self.tokenizer = load_tokenizer(data, where)
        self.share: BudgetShare | None = None  # where the memory of long texts is counted
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        decoder = self.tokenizer.decoder
        kinds = set() if decoder is None else _decoder_kinds(json.loads(decoder.__getstate__()))
        self.is_append_only, self.is_byte_level = kinds <= _APPEND_ONLY, "ByteLevel" in kinds
        added = self.tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._byte_tokens: dict[int, int] = {}
        if "ByteFallback" in kinds:
            # Look tokens up one by one: the whole vocabulary as Python strings would leave 30 MB of holes in the heap.
            spellings = {f"<0x{byte:02{case}}>": byte for byte in range(256) for case in "xX"}
            ids = {self.tokenizer.token_to_id(spelling): byte for spelling, byte in spellings.items()}
            self._byte_tokens = {id_: byte for id_, byte in ids.items() if id_ is not None}

    @property
    def vocabulary(self) -> int:
        size: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Return the tokens of `text`; with `add_special_tokens`, after the tokenizer's start token, if it has one.

        `most`: a text of far more tokens raises `ContextExceeded` without being read to its end; one of a few more is
        returned, for the caller to refuse.
        """
        check_size(text, most)
        if len(text) > _AT_ONCE and most is not None:
            self._check_count(text, most)
        ids: list[int] = self._read(text, lambda encoding: encoding.ids, add_special_tokens=add_special_tokens)
        return ids

    def encode_at_most(self, text: str, most: int) -> list[int]:
        """Return the first tokens of `text` with all special tokens around them, `most` in all."""
        special = self.tokenizer.num_special_tokens_to_add(is_pair=False)

        def cut(encoding: Any) -> list[int]:
            encoding.truncate(max(0, most - special))
            ids: list[int] = self.tokenizer.post_process(encoding).ids
            return ids[:most]

        return self._read(text[: text_bytes(most)], cut)

    def encode_pair(self, first: str, second: str, room: int, *, cuts: bool) -> tuple[list[int], int]:
        """Return the tokens of two texts with all special tokens, and the index of the second text's first token.

        The index is 0 if the tokenizer does not tell the texts apart. With `cuts`, the end of `second` is cut to give
        at most `room` tokens; one of its own stays in any case.
        """
        check_size(first, room)
        second = second[: text_bytes(room)] if cuts else second
        check_size(second, room)

        def joined(one: Any, other: Any) -> Any:
            if cuts:
                special = self.tokenizer.num_special_tokens_to_add(is_pair=True)
                other.truncate(max(1, room - special - len(one.ids)))
            return self.tokenizer.post_process(one, other)

        encoding = self._read(first, lambda one: self._read(second, lambda other: joined(one, other)))
        kinds: list[int] = encoding.type_ids
        start = kinds.index(1) if 1 in kinds else 0
        if kinds != [0] * start + [int(start > 0)] * (len(kinds) - start):
            raise InvalidInput("the tokenizer numbers the texts of a pair in another way than 0, then 1")
        return list(encoding.ids), start

    def _check_count(self, text: str, most: int) -> None:
        """Raise unless a long text may have at most `most` tokens, reading it slice by slice only as far as that."""
        count = 0
        for cuts, start in enumerate(range(0, len(text), _AT_ONCE)):
            count += self._read(text[start : start + _AT_ONCE], len)
            if count - _CUT_TOKENS * cuts > most:
                raise ContextExceeded(count, most, SHORTEN, found=f"more than {most} tokens")

    def _read(self, text: str, read: Callable[[Any], Result], *, add_special_tokens: bool = False) -> Result:
        """Encode a text and return the result of `read` on the encoding.

        Other threads go on while a long text is tokenised, and its memory is counted and given back.
        """
        is_long = len(text) > _AT_ONCE
        size = _BYTES_A_BYTE * len(text.encode()) if is_long else 0
        with self.share.lend(size, "workers") if self.share and is_long else nullcontext():
            with vendor_errors("tokenizers"):
                if is_long:  # `encode` would keep the interpreter's lock
                    (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                else:
                    encoding = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
                result = read(encoding)
            del encoding
            if is_long:
                return_unused()
        return result

    def id_of(self, token: str) -> int | None:
        """Return the token with this text; None if there is none."""
        found: int | None = self.tokenizer.token_to_id(token)
        return found

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        with vendor_errors("tokenizers"):
            text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token. They may be only a part of a character."""
        text = self.tokenizer.id_to_token(token) or ""
        if token in self._added:
            return text.encode("utf-8", "replace")
        if token in self._byte_tokens:
            return bytes([self._byte_tokens[token]])
        if self.is_byte_level:
            return bytes(_BYTE_OF.get(letter, ord("?")) for letter in text)
        return text.replace("\u2581", " ").encode("utf-8", "replace")

    def stream(self, *, context: Sequence[int] = (), skip_special: bool = True) -> Detokeniser:
        """Return a detokeniser for tokens that follow `context`."""
        return Detokeniser(self, context, skip_special)

    def is_byte(self, token: int) -> bool:
        """Return True for a raw byte; its character is only known at the end of its run of bytes."""
        return token in self._byte_tokens

    def is_special(self, token: int) -> bool:
        return token in self._special


def text_bytes(most: int | None) -> int:
    """Return the size from which on a text is refused, or cut, before it is tokenised."""
    return MAX_TEXT_BYTES if most is None else max(_AT_ONCE, _TOKEN_BYTES * most)


def check_size(text: str, most: int | None) -> None:
    """Raise for a text that is not Unicode, or too large for `most` tokens (None: for any use)."""
    limit = text_bytes(most)
    try:
        # A character takes a byte or more, so a large text is not even copied.
        size = len(text) if len(text) > limit else len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput("the text holds half a surrogate pair, which is not Unicode; decode it again") from error
    if size > limit and most is not None:
        raise ContextExceeded(max(most + 1, size // _TOKEN_BYTES), most, SHORTEN, found=f"{size:,} bytes")
    if size > limit:
        raise InvalidInput(f"a text of {size:,} bytes; at most {limit:,} are read")


class Detokeniser:
    """Decode a stream of tokens. Every piece has whole characters, and all pieces together equal `Codec.decode`.

    Each run of tokens is decoded together with the visible run before it, so that spaces are as in the whole text.
    Text that may still change (an incomplete character, a run of raw bytes) is held back.
    """

    def __init__(self, codec: Codec, context: Sequence[int], skip_special: bool) -> None:
        self._codec, self._skip = codec, skip_special
        self._tokens: list[int] = list(context[-16:])
        self._shown = codec.decode(self._tokens, skip_special=skip_special) if self._tokens else ""
        if self._shown.endswith(_REPLACEMENT) or not self._shown.strip() or not codec.is_append_only:
            self._tokens, self._shown = [], ""
        self._released = len(self._tokens)  # tokens whose text was returned

    def push(self, token: int) -> str:
        """Add a token; return the text that has become final."""
        if self._skip and self._codec.is_special(token):
            return ""  # even a skipped token does not end a run of bytes
        self._tokens.append(token)
        if self._codec.is_byte(token) or not self._codec.is_append_only:
            return ""
        text = self._codec.decode(self._tokens, skip_special=self._skip)
        if text.endswith(_REPLACEMENT):
            return self._release_undecodable(text) if len(self._tokens) - self._released >= _MOST_PENDING else ""
        return self._release(text)

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        return self._release(self._codec.decode(self._tokens, skip_special=self._skip))

    def _release_undecodable(self, text: str) -> str:
        """Return all but the last character, which alone may still change: UTF-8 has at most four bytes a character."""
        if not self._codec.is_byte_level:
            return ""
        for count in range(1, _MOST_PENDING):
            head, tail = (
                self._codec.decode(part, skip_special=self._skip)
                for part in (self._tokens[:-count], self._tokens[-count:])
            )
            if tail == _REPLACEMENT and head + tail == text:
                new = head[len(self._shown) :]
                self._tokens, self._shown, self._released = self._tokens[-count:], "", 0
                return new
        return ""

    def _release(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._shown = text
        if new.strip():
            # This run has visible text, so the tokens before it are no longer needed as context.
            self._keep(self._tokens[self._released :])
        elif len(self._tokens) >= 2 * _BLANK_CONTEXT:
            # So many blanks serve as well. All tokens of a long run would be decoded again for each of them.
            self._keep(self._tokens[-_BLANK_CONTEXT:])
        self._released = len(self._tokens)
        return new

    def _keep(self, tokens: list[int]) -> None:
        """Keep only some of the last tokens as context, if they have any text."""
        shown = self._codec.decode(tokens, skip_special=self._skip)
        if shown:
            self._tokens, self._shown = tokens, shown


def _decoder_kinds(decoder: dict[str, Any]) -> set[str]:
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return {kind for part in parts for kind in ([part["type"]] if part is decoder else _decoder_kinds(part))}


def read_codec(folder: Path) -> Codec:
    """Read the tokenizer of an artifact."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise InvalidInput(f"{folder}: holds no tokenizer.json; export it from a folder that has one")
    return Codec(read_bytes(path, MAX_TOKENIZER_BYTES), str(path))


def read_eos(folder: Path, known: Sequence[int]) -> frozenset[int]:
    """Return every token that ends a text: the model's, and more from `generation_config.json`."""
    path = folder / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.exists() else None
    tokens = eos if isinstance(eos, list) else [eos]
    return frozenset(known) | {token for token in tokens if type(token) is int}
