"""Builds llguidance's index of a vocabulary, with which it finds the tokens that may come next.

The index is built from the bytes of each token. From a tokenizer's file, llguidance would build a second tokenizer
as well, which takes twice the memory (Gemma 3: 236 MB instead of 103), and 340 MB more while it is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgekit.runtime.generation.tokenizer import Codec

# Measured on Linux for 4,096 to 262,144 tokens, llguidance's own code included: 4.3 MB to 103 MB. A number for which
# the tokenizer has no token takes half as much as a token.
_BYTES, _BYTES_A_NUMBER, _BYTES_A_TOKEN = 4 << 20, 190, 190


def index_bytes(codec: Codec, vocabulary: int) -> int:
    """Return the bytes that an index takes for the engine's number of tokens."""
    return _BYTES + _BYTES_A_NUMBER * vocabulary + _BYTES_A_TOKEN * min(vocabulary, codec.vocabulary)


def index_of(llguidance: Any, codec: Codec, vocabulary: int, eos: Sequence[int]) -> Any:
    """Build the index for the engine's number of tokens. Tokens that the tokenizer lacks are empty."""
    return llguidance.LLTokenizer(_Words(codec, vocabulary, eos), n_vocab=vocabulary, eos_token=list(eos) or None)


class _Words:
    """Adapter from `Codec` to the tokenizer interface that `llguidance.LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, codec: Codec, vocabulary: int, eos: Sequence[int]) -> None:
        self._codec = codec
        self.eos_token_id = eos[0] if eos else 0
        self.tokens = _TokenBytes(codec, vocabulary)
        self.special_token_ids = [token for token in range(vocabulary) if codec.is_special(token)]

    def __call__(self, text: str) -> list[int]:
        return self._codec.encode(text, add_special_tokens=False)


class _TokenBytes(Sequence[bytes]):
    """The bytes of each token, made one by one: a list of them would leave megabytes of holes in the heap."""

    def __init__(self, codec: Codec, vocabulary: int) -> None:
        self._codec, self._vocabulary = codec, vocabulary

    def __len__(self) -> int:
        return self._vocabulary

    def __getitem__(self, token: Any) -> Any:
        if token >= self._vocabulary:
            raise IndexError(token)
        return self._codec.token_bytes(token)
