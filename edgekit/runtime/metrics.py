"""What a runtime has done so far, as plain counters."""

from __future__ import annotations

from pydantic import Field

from edgekit.frozen import Frozen


class Timings(Frozen):
    """How one answer spent its time, in seconds, and how many tokens it took."""

    queue_s: float = 0.0  # until a state was free
    first_token_s: float | None = None  # from the request to its first token
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them, those that were known before and not fed again
    prefill_s: float = 0.0  # from the free state to the first token
    tokens: int = 0
    decode_s: float = 0.0  # from the first token to the last
    proposed: int = 0
    accepted: int = 0

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Tokens of the prompt that were fed, over the time they took."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first, over the time they took."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s > 0 else None


class Metrics(Frozen):
    """Counters of a runtime since it was opened."""

    requests: int = 0
    finished: dict[str, int] = Field(default_factory=dict)  # by finish reason; "error" where one failed
    waiting: int = 0
    running: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    evictions: int = 0
    steps: int = 0
    engine_s: float = 0.0  # inside the engine
    host_s: float = 0.0  # inside the loop, outside the engine
    # Of requests that have ended, summed:
    queue_s: float = 0.0  # until a state and its memory were free
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0  # of their prompts, that were not fed again
    # Now:
    held_tokens: int = 0  # in the caches of those that run
    room_tokens: int = 0  # that those caches have room for
    states_bytes: int = 0
    most_held_bytes: int = 0  # of all caches at once, that tokens ever filled
    prefix_bytes: int = 0
    prefix_runs: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_hit_tokens: int = 0
    prefix_asked_tokens: int = 0

    @property
    def occupancy(self) -> float | None:
        """Which share of the room in the caches of those that run is held."""
        return self.held_tokens / self.room_tokens if self.room_tokens else None

    @property
    def prefix_hit_rate(self) -> float | None:
        """Which share of all tokens of prompts was resident."""
        return self.prefix_hit_tokens / self.prefix_asked_tokens if self.prefix_asked_tokens else None
