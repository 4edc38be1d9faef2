"""Small tokenizers of every kind that the native library reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import runtimes
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def digits() -> Tokenizer:
    """SmolLM2 and StarCoder: single digits before GPT-2's pattern."""
    tokenizer = runtimes.byte_level()
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def llama3() -> Tokenizer:
    """Llama 3: a pattern of its own, whole words before merges, and a sequence of post-processors."""
    tokenizer = runtimes.byte_level()
    described = json.loads(tokenizer.to_str())
    described["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(described))
    words = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def metaspace(scheme: str, split: bool) -> Tokenizer:
    """Mistral: Metaspace as pre-tokenizer and decoder."""
    tokenizer = runtimes.gemma()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def gemma_split() -> Tokenizer:
    """Gemma 3: a split at spaces after the normaliser, and added tokens that take the spaces around them."""
    tokenizer = runtimes.gemma()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_tokens([AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True, normalized=False)])
    return tokenizer


def prefixed() -> Tokenizer:
    """GPT-2 with a space before each text, and digits in runs."""
    tokenizer = runtimes.byte_level()
    steps = [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def qwen() -> Tokenizer:
    """Qwen: letters and marks composed, and a pattern of its own."""
    tokenizer = llama3()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def splits(behaviour: str, invert: bool, pattern: Any) -> Tokenizer:
    tokenizer = runtimes.gemma()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behaviour, invert)
    return tokenizer


MADE: dict[str, Callable[[], Tokenizer]] = {
    "byte level": runtimes.byte_level,
    "digits": digits,
    "llama 2": runtimes.llama2,
    "llama 3": llama3,
    "qwen": qwen,
    "gemma": runtimes.gemma,
    "gemma split": gemma_split,
    "prefixed": prefixed,
    **{
        f"metaspace {scheme} {split}": lambda scheme=scheme, split=split: metaspace(scheme, split)
        for scheme in ("always", "first", "never")
        for split in (True, False)
    },
    **{
        f"{behaviour} {invert} {kind}": lambda one=behaviour, two=invert, three=pattern: splits(one, two, three)
        for behaviour in ("isolated", "removed", "merged_with_previous", "merged_with_next")
        for invert in (True, False)
        for kind, pattern in (("text", "▁"), ("regex", Regex(r"\p{N}+|[^\S\n]{2,3}|(?:a|e)?n(?=\s)|[A-Dx-z\-]")))
    },
}
