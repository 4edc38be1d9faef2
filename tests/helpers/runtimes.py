"""Small tokenizers and runtimes for tests: built in memory, one for each way of turning tokens into text."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.errors import EdgekitError
from edgekit.runtime.generation.chat_template import ChatTemplate
from edgekit.runtime.generation.tokenizer import Codec
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.runtime import Runtime
from edgekit.testing import FakeEngine
from edgekit.testing.drafting import Drafting

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "naïve",
    "façade",
    "日本",
    "語",
    "🙂",
    "éé",
    "a",
    "b",
    "c",
    "ing",
    "stop",
    ".",
]
_SPECIAL = ["<s>", "</s>", "<pad>"]
_ADDED = ["<tool_call>", "</tool_call>", "[X] y"]


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: every token is a run of bytes, so a character may be torn between tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoded = ["".join(piece for piece, _ in _byte_pieces(word)) for word in [*WORDS, *(f" {word}" for word in WORDS)]]
    tokenizer = Tokenizer(models.BPE(*_merged([*_SPECIAL, *alphabet], encoded)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer)


def _merged(pieces: list[str], words: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary that grows from `pieces` until it has every word, letter by letter, and its merges."""
    vocabulary, merges = {piece: place for place, piece in enumerate(pieces)}, []
    for word in words:
        for stop in range(2, len(word) + 1):
            left, right = word[: stop - 1], word[stop - 1]
            if left in vocabulary and left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    return vocabulary, merges


def _byte_pieces(word: str) -> list[tuple[str, tuple[int, int]]]:
    found: list[tuple[str, tuple[int, int]]] = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(word)
    return found


def _spm(decoder: Any, *, prepend: bool) -> Tokenizer:
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    characters = sorted({"▁", *"".join(word for word in WORDS if word.isascii()), "é", "語"})
    spelled = [word for word in WORDS if set(word) <= set(characters)]
    vocabulary, merges = _merged(
        [*_SPECIAL, "<unk>", *bytes_, *characters], [text for word in spelled for text in (word, f"▁{word}")]
    )
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    first = [normalizers.Prepend("▁")] if prepend else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    return _with_added(tokenizer)


def llama2() -> Tokenizer:
    """SentencePiece as Llama 2 has it: bytes for what the vocabulary lacks, one leading space dropped."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _spm(decoders.Sequence(steps), prepend=True)


def gemma() -> Tokenizer:
    """The same without a leading space."""
    return _spm(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), prepend=False
    )


def metaspace(scheme: str = "always") -> Tokenizer:
    """Unigram with Metaspace: the first token's leading space is dropped."""
    pieces = [*_SPECIAL, "<unk>", "▁", *(f"▁{word}" for word in WORDS), *WORDS, *"thecaonmi"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in dict.fromkeys(pieces)], 3, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _with_added(tokenizer)


def word_level() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate([*_SPECIAL, "<unk>", *WORDS])}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _with_added(tokenizer)


def suffixes() -> Tokenizer:
    """BPE with a mark at the end of each word."""
    pieces = [*_SPECIAL, *"abcdefghimnopqst.", *(f"{letter}</w>" for letter in "abcdefghimnopqst."), "th", "the</w>"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e</w>")], end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    return _with_added(tokenizer)


def connectionist() -> Tokenizer:
    """A decoder that folds repetitions, so that no prefix is certain: its text comes at the end."""
    pieces = [*_SPECIAL, "<unk>", "|", *"abcdef"]
    tokenizer = Tokenizer(models.WordLevel({piece: place for place, piece in enumerate(pieces)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.CTC(pad_token="<pad>")
    return _with_added(tokenizer)


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in _ADDED])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return tokenizer


TOKENIZERS = {
    "byte-level BPE": byte_level,
    "SentencePiece, Llama 2": llama2,
    "SentencePiece, Gemma": gemma,
    "Metaspace": metaspace,
    "Metaspace, first": lambda: metaspace("first"),
    "Metaspace, never": lambda: metaspace("never"),
    "no decoder": word_level,
    "word suffixes": suffixes,
    "CTC": connectionist,
}

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@lru_cache
def codec(name: str = "byte-level BPE") -> Codec:
    return Codec(TOKENIZERS[name]().to_str().encode(), name)


def refusal(action: Callable[[], object]) -> EdgekitError | None:
    """The error of ours that `action` raises; None where it is accepted."""
    found = None
    try:
        action()
    except EdgekitError as error:
        found = error
    assert found is None or (str(found) and "\n" not in str(found) and len(str(found)) < 700)
    return found


def make_runtime(
    engine: FakeEngine | None = None,
    *,
    tokenizer: str = "byte-level BPE",
    context: int = 512,
    window: int | None = None,
    sinks: int = 0,
    sequences: int = 4,
    chunk_tokens: int = 16,
    eos: frozenset[int] = frozenset(),
    drafting: Drafting | None = None,
    budget: MemoryBudget | None = None,
    prefix_bytes: int = 0,
) -> Runtime:
    """A runtime over the fake engine, without an artifact."""
    text = codec(tokenizer)
    return Runtime(
        engine or FakeEngine(vocabulary=text.vocabulary, max_states=max(4, sequences)),
        text,
        kv_config=KVCacheConfig(capacity_tokens=window or context, kv_bits=16),
        policy=KVEvictionPolicy.of(window, sinks),
        sequences=sequences,
        chunk_tokens=chunk_tokens,
        eos=eos,
        template=ChatTemplate({"default": TEMPLATE}, {"bos_token": "<s>"}),
        drafting=drafting,
        budget=budget,
        prefix_bytes=prefix_bytes,
    )
