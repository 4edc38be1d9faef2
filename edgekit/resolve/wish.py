"""What somebody asks of a plan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from edgekit.frozen import Frozen
from edgekit.recipe import Recipe

Prefer = Literal["balanced", "speed", "memory", "quality"]
WISHED_CONTEXT = 8192  # tokens, where no context was asked for and the model goes that far

_Tokens = Annotated[int, Field(ge=1, le=1 << 27)]


class Wish(Frozen):
    """Requirements and preferences. What is None was not asked for, and the resolver may choose it."""

    context: Annotated[int, Field(ge=16, le=1 << 27)] | None = None
    sequences: Annotated[int, Field(ge=1, le=4096)] = 1
    window: _Tokens | None = None
    sinks: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    kv_bits: Annotated[int, Field(ge=1, le=32)] | None = None  # of a key or value
    min_quality: Annotated[float, Field(ge=0, le=1)] | None = None  # share of tokens whose top choice stays
    max_memory_bytes: Annotated[int, Field(ge=1)] | None = None
    min_tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_first_token_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    prefer: Prefer = "balanced"
    target: str | None = None
    recipe: Recipe | None = None
    os_version: str | None = None
    entitlements: tuple[str, ...] = ()
    exits: Annotated[
        tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(max_length=16)
    ] = ()  # layers to leave after
    adapter_rank: Annotated[int, Field(ge=0, le=1024)] = 0  # the largest that a LoRA adapter may have; 0: none
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
