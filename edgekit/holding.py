"""What every engine counts and refuses alike: the tokens that a state holds, and the chunks that it may be fed.

It knows no tensors: engines move keys and values, this page says when they may.
"""

from __future__ import annotations

from edgekit.cache import Storage
from edgekit.errors import ContextExceeded, InvalidInput, Unsupported, clip
from edgekit.interfaces import Abilities, Chunk, Segment
from edgekit.segments import KeyValues


class Held:
    """The tokens of one state: how many were fed, how many are held, how many of those went through every layer."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.position = self.length = self.deep = 0
        self.is_open = True

    @property
    def room(self) -> int:
        return self.storage.capacity_tokens - self.length

    def fed(self, count: int, *, all_layers: bool) -> None:
        """`count` tokens were appended."""
        self.length += count
        self.position += count
        if all_layers:
            self.deep = self.length

    def rewind(self, count: int) -> None:
        """The last `count` tokens are forgotten; refused where fewer are held."""
        self.check_open()
        if not 0 <= count <= self.length:
            raise InvalidInput(f"cannot rewind {count} tokens; the state holds {self.length}")
        self.length -= count
        self.position -= count
        self.deep = min(self.deep, self.length)

    def check_evict(self, start: int, stop: int) -> None:
        self.check_open()
        if not 0 <= start <= stop <= self.length:
            raise InvalidInput(f"cannot evict tokens {start} to {stop}; the state holds {self.length}")
        if stop > self.deep:
            raise InvalidInput("cannot evict while tokens of an early exit are held; rewind them first")

    def evicted(self, count: int) -> None:
        """`count` tokens were dropped and the gap is closed."""
        self.length -= count
        self.deep -= count

    def check_save(self, start: int, stop: int) -> None:
        self.check_open()
        if self.position != self.length:
            raise Unsupported("a state that evicted tokens cannot be saved; save the prefix before the first eviction")
        if not 0 <= start <= stop <= self.deep:
            raise InvalidInput(f"cannot save tokens {start} to {stop}; the state holds {self.deep}")

    def check_restore(self, segment: Segment, model: str, form: str) -> KeyValues:
        """The segment, once it is one of this model, held as this state holds, and goes on where this state stands."""
        self.check_open()
        if not isinstance(segment, KeyValues) or segment.model != model:
            raise InvalidInput(f"{clip(segment)} was not saved by this model")
        if segment.form != form:
            raise InvalidInput(f"the segment holds {segment.form} keys and values, the state {form}")
        if segment.start != self.position or self.position != self.length or self.deep != self.length:
            raise InvalidInput(
                f"the segment begins at position {segment.start}; the state stands at {self.position} "
                f"and holds {self.length}"
            )
        if segment.tokens > self.room:
            raise InvalidInput(f"the segment has {segment.tokens} tokens and the state has room for {self.room}")
        return segment

    def check_open(self) -> None:
        if not self.is_open:
            raise InvalidInput("the state is closed")


def check_chunk(chunk: Chunk, held: Held, abilities: Abilities) -> None:
    """Refuse a chunk that the engine cannot take, or that its state has no room for."""
    count = len(chunk.tokens)
    if not 1 <= count <= abilities.max_chunk_tokens:
        raise InvalidInput(f"a chunk of {count} tokens; one to {abilities.max_chunk_tokens} are allowed")
    if not 0 <= chunk.rows <= count:
        raise InvalidInput(f"{chunk.rows} rows of a chunk of {count} tokens")
    if min(chunk.tokens) < 0 or max(chunk.tokens) >= abilities.vocabulary:
        raise InvalidInput(f"a token outside the vocabulary of {abilities.vocabulary}")
    if chunk.exit is not None and chunk.exit not in abilities.exits:
        raise Unsupported(f"no exit after layer {chunk.exit}; this artifact has {abilities.exits or 'none'}")
    if chunk.exit is None and held.deep != held.length:
        raise InvalidInput("tokens of an early exit are held; rewind them before all layers run")
    if count > held.room:
        raise ContextExceeded(count, held.room, "choose a larger context or a window")


def check_storage(storage: Storage, abilities: Abilities, planned: Storage, target: str) -> None:
    """Refuse a state that the artifact cannot hold."""
    if storage.adapter is not None and not abilities.adapters:
        raise Unsupported(f"{target}: adapter {clip(storage.adapter)}: merge it into the weights before quantising")
    if storage.kv_bits not in abilities.kv_bits:
        known = ", ".join(map(str, abilities.kv_bits))
        raise Unsupported(f"{target}: {storage.kv_bits}-bit keys and values; this artifact can have {known}")
    limit = planned.capacity_tokens
    if not 0 < storage.capacity_tokens <= limit:
        raise InvalidInput(f"a state of {storage.capacity_tokens} tokens; this artifact was planned for {limit}")
