"""Text to tokens and back, with `tokenizers` alone; streamed text is exactly what decoding all tokens at once gives.

It knows nothing of templates, stop strings or engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit.errors import InvalidInput
from edgekit.reading import read_bytes, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKENIZER_BYTES = 128 << 20
MAX_PROMPT_CHARACTERS = 16 << 20
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
# Decoders whose text only ever grows at its end, apart from broken characters; any other is decoded at the end.
_STEADY = {"ByteLevel", "Metaspace", "BPEDecoder", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip"}


class Codec:
    """A model's tokenizer, as `tokenizer.json` describes it."""

    def __init__(self, data: bytes, where: str) -> None:
        from tokenizers import Tokenizer

        try:
            self.tokenizer: Tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the vendor raises bare Exception
            raise InvalidInput(f"{where}: not a tokenizer: {str(error)[:200]}; export the artifact again") from error
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        decoder = self.tokenizer.decoder
        kinds = set() if decoder is None else _decoder_kinds(json.loads(decoder.__getstate__()))
        self._steady = kinds <= _STEADY
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._byte_tokens: frozenset[int] = frozenset()
        if "ByteFallback" in kinds:
            vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
            self._byte_tokens = frozenset(id_ for token, id_ in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))

    @property
    def vocabulary(self) -> int:
        size: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of `text`; with `add_special_tokens`, as the tokenizer opens a text (usually one bos)."""
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise InvalidInput(f"a text of {len(text):,} characters; at most {MAX_PROMPT_CHARACTERS:,} are read")
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidInput("the text holds half a surrogate pair, which is not Unicode; decode it again") from error
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def stream(self, *, context: Sequence[int] = (), skip_special: bool = True) -> Detokeniser:
        """A fresh detokeniser; with `context`, for text that goes on after those tokens."""
        return Detokeniser(self, context, skip_special)

    def is_byte(self, token: int) -> bool:
        """Whether the token is one raw byte, whose character is known only when its run of bytes has ended."""
        return token in self._byte_tokens

    def is_special(self, token: int) -> bool:
        return token in self._special

    @property
    def is_steady(self) -> bool:
        return self._steady


class Detokeniser:
    """Tokens in, text out: every piece is whole characters, and all pieces together are what `decode` gives.

    A run of tokens is decoded together with the visible run before it, so that spaces and joins come out as they do
    in the whole text; what may still change (half a character, a run of raw bytes) is held back.
    """

    def __init__(self, codec: Codec, context: Sequence[int], skip_special: bool) -> None:
        self._codec, self._skip = codec, skip_special
        self._tokens: list[int] = list(context[-16:])
        self._shown = codec.decode(self._tokens, skip_special=skip_special) if self._tokens else ""
        if self._shown.endswith(_REPLACEMENT) or not self._shown.strip() or not codec.is_steady:
            self._tokens, self._shown = [], ""
        self._settled = len(self._tokens)  # tokens whose text was given out

    def push(self, token: int) -> str:
        """The text that is certain now."""
        if self._skip and self._codec.is_special(token):
            return ""  # as if it were not there: it does not even end a run of bytes
        self._tokens.append(token)
        if self._codec.is_byte(token) or not self._codec.is_steady:
            return ""
        text = self._codec.decode(self._tokens, skip_special=self._skip)
        if text.endswith(_REPLACEMENT):
            return ""
        return self._settle(text)

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        return self._settle(self._codec.decode(self._tokens, skip_special=self._skip))

    def _settle(self, text: str) -> str:
        new = text[len(self._shown) :]
        if new.strip():
            # From here on, this run is context enough: it has visible text of its own.
            self._tokens = self._tokens[self._settled :]
            self._shown = self._codec.decode(self._tokens, skip_special=self._skip)
        else:
            self._shown = text
        self._settled = len(self._tokens)
        return new


def _decoder_kinds(decoder: dict[str, Any]) -> set[str]:
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return {kind for part in parts for kind in ([part["type"]] if part is decoder else _decoder_kinds(part))}


def read_codec(folder: Path) -> Codec:
    """The tokenizer of an artifact."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise InvalidInput(f"{folder}: holds no tokenizer.json; export it from a folder that has one")
    return Codec(read_bytes(path, MAX_TOKENIZER_BYTES), str(path))


def read_eos(folder: Path, known: Sequence[int]) -> frozenset[int]:
    """Every token that ends a text: the model's, and those that `generation_config.json` adds."""
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.exists() else None
    listed = found if isinstance(found, list) else [found]
    return frozenset(known) | {token for token in listed if type(token) is int}
