"""The loop of the native library, which opens artifacts and generates text without the scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class NativeAnswer(NamedTuple):
    """A generated text, and the tokens behind it."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int  # of the prompt, not computed again
    drafted_tokens: int
    accepted_tokens: int
    prefill_s: float
    decode_s: float


class NativeMemory(NamedTuple):
    """Bytes of an opened model. None: this system does not count them."""

    weights: int | None  # resident pages of mapped files, which the system may drop
    engine: int | None  # private: what opening took, with packed weights
    cache: int  # once it is full
    cache_used: int
    activations: int | None  # private: what was taken since, without the cache
    process_private: int | None
    process_peak: int | None  # resident at once, files included


class LoopStream(Protocol):
    """An answer that is being generated; iterate over its text."""

    def __iter__(self) -> Iterator[str]: ...

    def answer(self) -> NativeAnswer:
        """Wait for the end and return the whole answer."""
        ...

    def cancel_soon(self) -> None: ...

    def close(self) -> None:
        """Cancel the answer and wait for its end."""
        ...


class OpenedLoop(Protocol):
    """An opened artifact. `maps_weights`: they are mapped, packed or as they are, and not copied."""

    maps_weights: bool

    def stream(self, prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> LoopStream:
        """Answer a text or messages; options are fields of `edgekit_options` in edgekit_native.h."""
        ...

    def memory(self) -> NativeMemory:
        """Measure the memory now; not while an answer is being generated."""
        ...

    def close(self) -> None: ...


class LoopOpener(Protocol):
    """Opens an artifact of a target; raises `TargetMissing` where the library for it is not installed."""

    def __call__(self, artifact: Path, target: str, *, exact: bool = False, drafts: bool = False) -> OpenedLoop: ...
