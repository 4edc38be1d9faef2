"""Chooses the tokens that a drafting head may propose if it shares the rows of the target's head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgekit.errors import InvalidInput
from edgekit.model.spec import ModelSpec
from edgekit.model.tokenizer_file import read_tokenizer
from edgekit.quant.calibration import bundled_documents, encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ADDED = 256  # some tokenizers have thousands more, reserved for no use


def draft_tokens(folder: Path, model: ModelSpec, count: int) -> NDArray[np.int64]:
    """Return `count` tokens of the model in ascending order, chosen with the tokenizer in `folder`.

    The ends of text come first, then single bytes and added tokens (marks of chats and tool calls), then the most
    frequent tokens of the bundled text, and then the lowest, which a tokenizer learned first.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidInput(f"{folder}: has no tokenizer.json, from which the tokens that a head drafts are chosen")
    tokenizer = read_tokenizer(path)
    spelled = [*ByteLevel.alphabet(), *(f"<0x{byte:02X}>" for byte in range(256))]
    single = [token for each in spelled if (token := tokenizer.token_to_id(each)) is not None]
    found, times = np.unique(encode(bundled_documents(), folder), return_counts=True)
    frequent = found[np.argsort(-times, kind="stable")].tolist()
    added = sorted(tokenizer.get_added_tokens_decoder())[:_ADDED]
    ranked = dict.fromkeys([*model.eos_ids, *sorted(single), *added, *frequent, *range(model.vocab_size)])
    chosen = [token for token in ranked if token < model.vocab_size][:count]
    return np.sort(np.array(chosen, np.int64))
