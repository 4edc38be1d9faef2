"""Token counts of a state, and checks of the chunks that it accepts; shared by all engines."""

from __future__ import annotations

from collections.abc import Sequence

from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.engine import Chunk, Segment
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.enginekit.kv_segment import KeyValues
from edgekit.errors import ContextExceeded, InvalidInput, Unsupported, quote_short


class Held:
    """The token counts of one state.

    `position` counts all tokens fed, `length` the cached ones, and `deep` the cached ones that have passed every layer,
    which tokens of an early exit have not.
    """

    def __init__(self, storage: KVCacheConfig) -> None:
        self.storage = storage
        self.position = self.length = self.deep = 0
        self.is_open = True

    @property
    def remaining_capacity(self) -> int:
        return self.storage.capacity_tokens - self.length

    def append(self, count: int, *, all_layers: bool) -> None:
        """Count appended tokens. `all_layers`: False for tokens of an early exit."""
        self.length += count
        self.position += count
        if all_layers:
            self.deep = self.length

    def rewind(self, count: int) -> None:
        """Remove the last `count` tokens. Raises `InvalidInput` if fewer are cached."""
        self.check_open()
        if not 0 <= count <= self.length:
            raise InvalidInput(f"cannot rewind {count} tokens; the state holds {self.length}")
        self.length -= count
        self.position -= count
        self.deep = min(self.deep, self.length)

    def check_evict(self, spans: Sequence[Eviction]) -> None:
        """Raise `InvalidInput` for tokens that are not cached, or while tokens of an early exit are cached."""
        self.check_open()
        least = 0
        for start, stop in spans:
            if not least <= start <= stop <= self.length:
                raise InvalidInput(f"cannot evict tokens {start} to {stop}; the state holds {self.length}")
            if stop > self.deep:
                raise InvalidInput("cannot evict while tokens of an early exit are held; rewind them first")
            least = stop

    def check_scores(self, start: int) -> None:
        """Raise `InvalidInput` unless there are tokens from `start` on, and every token has passed all layers."""
        self.check_open()
        if not 0 <= start < self.length or self.deep != self.length:
            raise InvalidInput(f"cannot score tokens from {start} on; the state holds {self.deep}")

    def check_cached(self, start: int, stop: int) -> None:
        """Raise `InvalidInput` unless there are tokens from `start` to `stop`, and all have passed every layer."""
        self.check_open()
        if not 0 <= start < stop <= self.length or self.deep != self.length:
            raise InvalidInput(f"cannot read keys of tokens {start} to {stop}; the state holds {self.deep}")

    def check_newest(self, tokens: Sequence[int], vocabulary: int) -> None:
        """Raise `InvalidInput` unless `tokens` can be the newest cached ones."""
        if not 0 < len(tokens) <= self.length or not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise InvalidInput(f"scores by attention need the newest tokens of a text; {len(tokens)} were given")

    def remove(self, count: int) -> None:
        """Count evicted tokens."""
        self.length -= count
        self.deep -= count

    @property
    def evicted(self) -> int:
        return self.position - self.length

    def check_save(self, start: int, stop: int, *, can_save_evicted: bool) -> None:
        """Raise for tokens that are not cached (`InvalidInput`) and for unsupported saves after an eviction."""
        self.check_open()
        if self.evicted and not can_save_evicted:
            raise Unsupported("a state that evicted tokens cannot be saved; save the prefix before the first eviction")
        if self.evicted and start:
            raise Unsupported("a state that evicted tokens can only be saved from its first cached token on")
        if not 0 <= start <= stop <= self.deep:
            raise InvalidInput(f"cannot save tokens {start} to {stop}; the state holds {self.deep}")

    def check_restore(self, segment: Segment, model: str, form: str) -> KeyValues:
        """Validate that `segment` has this model, KV format and start position, and fits; return it."""
        self.check_open()
        if not isinstance(segment, KeyValues) or segment.model != model:
            raise InvalidInput(f"{quote_short(segment)} was not saved by this model")
        if segment.form != form:
            raise InvalidInput(f"the segment holds {segment.form} keys and values, the state {form}")
        if segment.start != self.position or self.evicted or self.deep != self.length:
            raise InvalidInput(
                f"the segment begins at position {segment.start}; the state is at {self.position} "
                f"and holds {self.length}"
            )
        if segment.tokens > self.remaining_capacity:
            raise InvalidInput(
                f"the segment has {segment.tokens} tokens and the state has room for {self.remaining_capacity}"
            )
        return segment

    def check_open(self) -> None:
        if not self.is_open:
            raise InvalidInput("the state is closed")


def check_chunk(chunk: Chunk, held: Held, capabilities: Capabilities) -> None:
    """Refuse a chunk that the engine cannot process, or that exceeds the capacity of its state."""
    count = len(chunk.tokens)
    if not 1 <= count <= capabilities.max_chunk_tokens:
        raise InvalidInput(f"a chunk of {count} tokens; one to {capabilities.max_chunk_tokens} are allowed")
    if not 0 <= chunk.num_logits <= count:
        raise InvalidInput(f"{chunk.num_logits} logits of a chunk of {count} tokens")
    if min(chunk.tokens) < 0 or max(chunk.tokens) >= capabilities.vocabulary:
        raise InvalidInput(f"a token outside the vocabulary of {capabilities.vocabulary}")
    if chunk.hidden and (capabilities.hidden_size is None or chunk.exit_layer is not None):
        raise Unsupported("this engine gives no hidden states, or not at an early exit")
    if chunk.second and not capabilities.classifies:
        raise Unsupported("this engine reads single texts, no pairs")
    if not 0 <= chunk.second < count:
        raise InvalidInput(f"the second text of a chunk of {count} tokens begins at {chunk.second}")
    if chunk.exit_layer is not None and chunk.exit_layer not in capabilities.exits:
        raise Unsupported(f"no exit after layer {chunk.exit_layer}; this artifact has {capabilities.exits or 'none'}")
    if chunk.features is not None:
        check_features_of(chunk, capabilities)
    most = capabilities.max_position
    if most is not None and held.position + count > most:
        raise InvalidInput(f"position {held.position + count} is past the last one, {most}")
    if chunk.exit_layer is None and held.deep != held.length:
        raise InvalidInput("tokens of an early exit are held; rewind them before all layers run")
    if count > held.remaining_capacity:
        raise ContextExceeded(count, held.remaining_capacity, "choose a larger context or a window")


def check_features_of(chunk: Chunk, capabilities: Capabilities) -> None:
    """Raise unless `chunk.features` can hold the features of the chunk's tokens."""
    if not capabilities.feature_layers or chunk.exit_layer is not None:
        raise Unsupported("this artifact gives no hidden states; export it with a drafting head (--drafter)")
    expected = (len(chunk.tokens), capabilities.feature_width)
    hidden = chunk.features
    if hidden is None or hidden.shape != expected or hidden.dtype.name != "float32" or not hidden.flags.writeable:
        raise InvalidInput(f"hidden states of a chunk need a float32 array of shape {list(expected)} to write to")


def check_storage(storage: KVCacheConfig, capabilities: Capabilities, planned: KVCacheConfig, target: str) -> None:
    """Raise for a cache configuration that the artifact was not planned for."""
    if storage.adapter is not None and not capabilities.adapters:
        raise Unsupported(
            f"{target}: adapter {quote_short(storage.adapter)}: merge it into the weights before quantising"
        )
    if storage.kv_bits not in capabilities.kv_bits:
        known = ", ".join(map(str, capabilities.kv_bits))
        raise Unsupported(f"{target}: {storage.kv_bits}-bit keys and values; this artifact can have {known}")
    limit = planned.capacity_tokens
    if not 0 < storage.capacity_tokens <= limit:
        raise InvalidInput(f"a state of {storage.capacity_tokens} tokens; this artifact was planned for {limit}")
