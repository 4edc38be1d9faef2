"""Pre-tokenizers of byte-level BPE by their GGUF names. Pure data."""

from __future__ import annotations

from typing import NamedTuple

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_PATH_TAIL}"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PATH_TAIL}"
)


class Split(NamedTuple):
    """Rules that split text before BPE merges. `pattern` None: GPT-2's own."""

    pattern: str | None
    single_digits: bool = False
    ignore_merges: bool = False  # a piece that is itself a token becomes that token, without merges
    add_bos: bool = False  # unless the file says otherwise
    composed: bool = False  # Unicode's composed form (NFC) first


_GPT2, _DIGITS, _LLAMA_BPE = Split(None), Split(None, single_digits=True), Split(_LLAMA3, False, True, True)
SPLITS = {
    "gpt-2": _GPT2, "phi-2": _GPT2, "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS,
    "llama-bpe": _LLAMA_BPE, "llama3": _LLAMA_BPE, "llama-v3": _LLAMA_BPE, "falcon3": _LLAMA_BPE,
    "smaug-bpe": Split(_LLAMA3), "dbrx": Split(_LLAMA3),
    "qwen2": Split(_QWEN2, composed=True), "deepseek-r1-qwen": Split(_QWEN2, composed=True),
    "tekken": Split(_TEKKEN, ignore_merges=True, add_bos=True), "gpt-4o": Split(_O200K),
}  # fmt: skip
