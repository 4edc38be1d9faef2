"""Profiles of data-centre GPUs, for plans of servers, and groups of them in the notation `H100x4`.

They are separate from device profiles: edgekit itself does not run on these GPUs, so `plan` does not accept them. Every
number names its source.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

from edgekit.common.base import Frozen
from edgekit.common.parsing import read_yaml
from edgekit.contracts.device import DeviceName, SourcedBytes, SourcedNumber, Title
from edgekit.errors import InvalidInput, UnknownName, quote_short

MOST_GPUS = 1024
_PROFILES = Path(__file__).with_name("gpu_profiles")
_GROUP = re.compile(r"([a-z0-9-]{1,64}?)(?:x([1-9][0-9]{0,3}))?", re.ASCII)


class GpuProfile(Frozen):
    """One GPU, as a file of `gpu_profiles` describes it."""

    name: DeviceName
    title: Title
    architecture: Literal["ampere", "ada", "hopper", "blackwell", "cdna3"]
    memory: SourcedBytes  # available to programs, without the driver's and error correction's share
    peak_bandwidth_gb_s: SourcedNumber
    fp16_tflops: SourcedNumber  # of dense matrices, as is the next
    fp8_tflops: SourcedNumber | None = None  # None: the GPU has no FP8 arithmetic
    link_gb_s: SourcedNumber  # to the other GPUs of its machine, in one direction


class GpuGroup(NamedTuple):
    """`size` GPUs of one kind, joined by the links of the profile."""

    gpu: GpuProfile
    size: int

    def __str__(self) -> str:
        return f"{self.gpu.name}x{self.size}"


def all_gpus() -> dict[str, GpuProfile]:
    """Read every profile of a GPU, keyed by name."""
    profiles = (read_yaml(file, GpuProfile) for file in sorted(_PROFILES.glob("*.yaml")))
    return {profile.name: profile for profile in profiles}


def gpu_group(text: str) -> GpuGroup:
    """Parse `H100x4`, or `H100` for one. Raises `InvalidInput`, or `UnknownName` with the known GPUs."""
    match = _GROUP.fullmatch(text.lower().replace("_", "-"))
    if match is None:
        raise InvalidInput(f"--gpu {quote_short(text)}: write the GPU and how many of it, such as H100x4")
    known = all_gpus()
    # Both sizes of the A100 have their own names.
    name = "a100-80gb" if match[1] in ("a100", "a100-80") else "a100-40gb" if match[1] == "a100-40" else match[1]
    if name not in known:
        raise UnknownName("GPU", match[1], known)
    count = int(match[2] or 1)
    if count > MOST_GPUS:
        raise InvalidInput(f"--gpu {quote_short(text)}: more than {MOST_GPUS} GPUs")
    return GpuGroup(known[name], count)
