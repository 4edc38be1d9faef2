"""What a device is: memory, limits, bandwidth, compute, and what runs on it. Every number says where it comes from.

Pure data and arithmetic: detecting `this` machine and finding profile files live elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator

from edgekit.frozen import Frozen
from edgekit.units import parse_bytes

Confidence = Literal["measured", "documented", "derived", "recalled"]
Os = Literal["ios", "ipados", "android", "macos", "linux", "windows"]
Size = Annotated[int, BeforeValidator(lambda value: parse_bytes(value) if isinstance(value, str) else value)]


class Bytes(Frozen):
    """An amount of memory, e.g. `8GiB`."""

    value: Size
    source: str
    confidence: Confidence


class Number(Frozen):
    """Any other figure; its unit stands in the field's name."""

    value: float
    source: str
    confidence: Confidence


class AppLimit(Frozen):
    """What the OS lets one app use, for a range of OS versions, without or with an entitlement."""

    from_version: str
    before_version: str | None = None
    entitlement: str | None = None
    limit: Bytes


class Budget(NamedTuple):
    """How much one app may use, and why. `private` bounds what the OS charges to the app, `total` what must be in RAM."""

    private_bytes: int
    total_bytes: int
    why: str


class DeviceProfile(Frozen):
    """One device."""

    name: str
    title: str
    kind: Literal["phone", "tablet", "mac", "pc", "board", "edge-gpu", "gpu"]
    os: Os
    os_version: str  # planned for unless told otherwise
    chip: str
    ram: Bytes
    vram: Bytes | None = None  # a discrete GPU's own memory, from which its targets run
    reserve: Bytes  # what the OS and other programs keep of `ram` (of `vram` where there is one)
    app_limits: tuple[AppLimit, ...] = ()
    peak_bandwidth_gb_s: Number
    usable_bandwidth_gb_s: Number  # what decoding was seen to reach; never above peak
    fp32_tflops: Number | None = None
    fp16_tflops: Number | None = None
    int8_tops: Number | None = None
    cpu_cores: int
    simd: tuple[str, ...] = ()
    targets: dict[str, tuple[str, ...]]  # target → backends that run here, best first: {"onnx": ["cuda", "cpu"]}
    notes: tuple[str, ...] = ()

    def budget(self, os_version: str | None = None, entitlements: frozenset[str] = frozenset()) -> Budget:
        """What one app may use on this device under that OS version with those entitlements."""
        raise AssertionError("written with the profiles")
