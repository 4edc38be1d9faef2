"""Profiles of data-centre GPUs, for plans of servers. Every number names its source.

They are separate from device profiles: edgekit itself does not run on these GPUs, so `plan` does not accept them.
"""

from __future__ import annotations

from typing import Literal

from edgekit.common.base import Frozen
from edgekit.contracts.device import DeviceName, SourcedBytes, SourcedNumber, Title


class GpuProfile(Frozen):
    """One GPU, as a file of `profiles/gpus` describes it."""

    name: DeviceName
    title: Title
    architecture: Literal["ampere", "ada", "hopper", "blackwell", "cdna3"]
    memory: SourcedBytes  # available to programs, without the driver's and error correction's share
    peak_bandwidth_gb_s: SourcedNumber
    fp16_tflops: SourcedNumber  # of dense matrices, as is the next
    fp8_tflops: SourcedNumber | None = None  # None: the GPU has no FP8 arithmetic
    link_gb_s: SourcedNumber  # to the other GPUs of its machine, in one direction
