"""Bounded types for the fields of data that is read from files.

The bounds lie well beyond any real model or machine; they keep arithmetic, loops and allocations finite.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

MAX_TOKENS = 1 << 28
MAX_SEED = 2**63 - 1

Version = Annotated[int, Field(ge=1, le=1 << 16)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
Word = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}\z")]
Text = Annotated[str, StringConstraints(max_length=10_000)]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\z")]  # never a path

Bytes = Annotated[int, Field(ge=0, le=1 << 100)]  # predictions for absurd models stay numbers
FileBytes = Annotated[int, Field(ge=0, le=1 << 60)]
Bits = Annotated[int, Field(ge=0, le=64)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=0, le=1 << 40)]
Sequences = Annotated[int, Field(ge=1, le=4096)]
Repeats = Annotated[int, Field(ge=1, le=1000)]  # of a measurement
Loads = Annotated[int, Field(ge=1, le=100)]  # fresh processes that open an artifact
Threads = Annotated[int, Field(ge=1, le=1024)]
ChunkTokens = Annotated[int, Field(ge=1, le=1 << 16)]
LayerCount = Annotated[int, Field(ge=1, le=4096)]
LayerIndex = Annotated[int, Field(ge=0, lt=4096)]
GpuLayers = Annotated[int, Field(ge=0, le=4097)]  # with the head
Size = Annotated[int, Field(ge=1, le=1 << 24)]  # of one dimension of a model

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]  # seconds, tokens per second, nats
MachineNumber = Annotated[float, Field(gt=1e-9, lt=1e6, allow_inf_nan=False)]  # a measured time, rate or ratio
Moment = Annotated[float, Field(ge=-1e18, le=1e18, allow_inf_nan=False)]  # seconds since the epoch, of any clock
