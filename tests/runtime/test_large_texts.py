"""Texts of megabytes: refused by their size, or read only as far as needed, while other threads go on."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from time import sleep
from typing import Any

import pytest
from runtimes import TOKENIZERS, codec, make_runtime

from edgekit.errors import ContextExceeded, InvalidInput
from edgekit.runtime.generation.tokenizer import Codec, text_bytes
from edgekit.runtime.runtime import Runtime

MB = 1_000_000
HUGE = {"words": "the cat " * MB, "letters": "a" * 8 * MB, "blanks": " " * 8 * MB, "no ASCII": "é" * 4 * MB}


class CountingTokenizer:
    """Counts the characters that a tokenizer is given."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.characters = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self._inner.encode(text, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._inner.encode_batch_fast(texts, **options)


def counting(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> CountingTokenizer:
    counter = CountingTokenizer(runtime.codec.tokenizer)
    monkeypatch.setattr(runtime.codec, "tokenizer", counter)
    return counter


WAYS: dict[str, Callable[[Runtime, str], Any]] = {
    "generate": lambda runtime, text: runtime.generate(text, max_tokens=1),
    "chat": lambda runtime, text: runtime.chat([{"role": "user", "content": text}], max_tokens=1),
    "chat in parts": lambda runtime, text: runtime.chat(
        [{"role": "user", "content": [{"type": "text", "text": text[place : place + 1000]}]} for place in range(9000)],
        max_tokens=1,
    ),
    "tools": lambda runtime, text: runtime.chat(
        [{"role": "user", "content": "a"}], tools=[{"name": "f", "description": text}], max_tokens=1
    ),
    "template options": lambda runtime, text: runtime.chat(
        [{"role": "user", "content": "a"}], template_options={"style": text}, max_tokens=1
    ),
    "render": lambda runtime, text: runtime.render([{"role": "user", "content": text}]),
    "score": lambda runtime, text: runtime.score(text, ["a"]),
    "a continuation": lambda runtime, text: runtime.score("a", [text]),
    "embed": lambda runtime, text: runtime.embed([text], pooling="mean"),
    "pin": lambda runtime, text: runtime.pin(text).__enter__(),
    "tokens": lambda runtime, text: runtime.complete([1] * len(text), max_tokens=1),
    "window": lambda runtime, text: runtime.generate(text, max_tokens=1, window=64),
}


@pytest.mark.parametrize("kind", HUGE)
@pytest.mark.parametrize("way", WAYS)
def test_a_text_of_megabytes_is_refused_unread(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runtime(context=256, prefix_bytes=1 << 20) as runtime:
        counter = counting(monkeypatch, runtime)
        with pytest.raises(ContextExceeded if way == "generate" else InvalidInput):  # a server answers them differently
            WAYS[way](runtime, HUGE[kind])
        assert counter.characters < 100
        assert runtime.template.process_id is None  # nothing was rendered either
        assert len(runtime.generate("the cat", max_tokens=1).tokens) == 1


def test_truncated_texts_are_cut_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runtime(context=256) as runtime:
        counter = counting(monkeypatch, runtime)
        cut = runtime.embed([HUGE["words"]], pooling="mean", truncate=True)
        assert counter.characters <= 3 * text_bytes(256)
        assert (cut == runtime.embed([HUGE["words"][:4000]], pooling="mean", truncate=True)).all()


def test_a_long_text_is_read_only_as_far_as_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runtime(context=40_000, chunk_tokens=64) as runtime:
        text = "b " * 300_000  # within the bytes that 40,000 tokens may have
        assert len(text) < text_bytes(39_999)
        counter = counting(monkeypatch, runtime)
        with pytest.raises(
            ContextExceeded, match="more than 39999 tokens and there is room for 39999 tokens"
        ) as caught:
            runtime.generate(text, max_tokens=1)
        assert caught.value.max_tokens == 39_999 < caught.value.prompt_tokens
        assert counter.characters < len(text) / 2


@pytest.mark.parametrize("name", TOKENIZERS)
def test_long_texts_have_the_tokens_of_the_library(name: str) -> None:
    one = codec(name)
    text = "the cat sat on the mat. naïve façade 日本語 🙂 " * 1200
    for adds in (False, True):
        expected = one.tokenizer.encode(text, add_special_tokens=adds).ids
        assert one.encode(text, add_special_tokens=adds, most=len(expected)) == expected
        with pytest.raises(ContextExceeded):
            one.encode(text, add_special_tokens=adds, most=len(expected) // 2)


def test_other_threads_go_on_while_a_long_text_is_read() -> None:
    reader: Codec = codec("byte-level BPE")
    turns, stop = [0], Event()

    def count() -> None:
        while not stop.is_set():
            sleep(0.0005)
            turns[0] += 1

    counting_thread = Thread(target=count)
    counting_thread.start()
    try:
        before = turns[0]
        reader.encode("the cat sat " * 250_000, add_special_tokens=False)
        assert turns[0] - before > 5
    finally:
        stop.set()
        counting_thread.join()


def test_the_memory_of_a_long_text_is_counted_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_runtime(context=60_000) as runtime:
        taken = list[int]()
        tokenizer = runtime.codec.tokenizer

        class Watching(CountingTokenizer):
            def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
                taken.append(runtime._budget.taken.get("workers", 0))
                return super().encode_batch_fast(texts, **options)

        monkeypatch.setattr(runtime.codec, "tokenizer", Watching(tokenizer))
        runtime.encode("the cat " * 6000)
        assert max(taken) > 10 * MB and runtime._budget.taken.get("workers", 0) == 0
