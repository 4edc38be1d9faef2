"""Device profiles: memory, limits, bandwidth, compute and the targets that run. Every number names its source.

Pure data and arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import not_
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, ValidationInfo, field_validator

from edgekit.common.base import Frozen
from edgekit.common.bounds import Word
from edgekit.common.units import parse_bytes, show_bytes
from edgekit.errors import InvalidInput, UnknownName, quote_short

HOST_RESERVE = 8  # an eighth of the RAM of a GPU's host is kept for the system, a rule of thumb
_APPLE_PREFIX = "com.apple.developer.kernel."


def parse_version(text: str) -> tuple[int, ...]:
    """Parse `26.4` into a comparable tuple; `26` equals `26.0`."""
    parts = text.split(".")
    if not 1 <= len(parts) <= 4 or not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise InvalidInput(
            f"OS version {quote_short(text)} is not one to four numbers with dots between them, such as 26.4"
        )
    numbers = [int(part) for part in parts]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _size(value: Any) -> Any:
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except InvalidInput as error:
        raise ValueError(str(error)) from error


def _version(text: str) -> str:
    try:
        parse_version(text)
    except InvalidInput as error:
        raise ValueError(str(error)) from error
    return text


Confidence = Literal["measured", "documented", "derived", "recalled"]
Os = Literal["ios", "ipados", "android", "macos", "linux", "windows"]
DeviceKind = Literal["phone", "tablet", "mac", "pc", "board", "edge-gpu", "gpu"]
ByteSize = Annotated[int, BeforeValidator(_size), Field(gt=0, le=1 << 50)]
DeviceName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64)]
OsVersion = Annotated[str, AfterValidator(_version)]
Title = Annotated[str, StringConstraints(min_length=1, max_length=1000)]

GPU_BACKENDS = ("metal", "cuda", "vulkan", "coreml")
THIS, THIS_CPU = "this", "this-cpu"  # names of this machine, with its GPU and without


Spread = tuple[Annotated[float, Field(gt=0, le=0.9)], Annotated[float, Field(ge=1.1, le=100)]]


class SourcedBytes(Frozen):
    """An amount of memory, e.g. `8GiB`."""

    value: ByteSize
    source: Title
    confidence: Confidence


class SourcedNumber(Frozen):
    """A figure that is not an amount of memory; the field's name states the unit."""

    value: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
    source: Title
    confidence: Confidence


class SourcedCount(Frozen):
    """An integer count."""

    value: Annotated[int, Field(gt=0, le=4096)]
    source: Title
    confidence: Confidence


class EngineFigures(Frozen):
    """What decoding reaches on one processor, or with one engine."""

    bandwidth_gb_s: SourcedNumber | None = None  # None: `usable_bandwidth_gb_s`
    layer_ms: SourcedNumber | None = None  # of a step, for each layer; None: as the target says
    # Calibrated with this engine: the lowest and highest speed, relative to the predicted one.
    spread: Annotated[Spread | None, Field(exclude_if=not_)] = None


class PublishedSpeed(Frozen):
    """A figure that somebody measured on this device; predictions are tested against it."""

    model: Title
    recipe: Word
    engine: Word  # target.backend
    context: Annotated[int, Field(ge=0, le=1 << 27)] = 64  # tokens in the cache, on average
    decode_tokens_per_s: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    prefill_tokens_per_s: Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)] | None = None
    source: Title


class AppLimit(Frozen):
    """The memory that the OS allows one app, for a range of OS versions, with or without an entitlement."""

    from_version: OsVersion
    before_version: OsVersion | None = None
    entitlement: Word | None = None
    counts: Literal["private", "all"] = "private"  # "all": clean mapped pages are charged too
    limit: SourcedBytes

    @field_validator("before_version")
    @classmethod
    def _range_holds_something(cls, before: str | None, known: ValidationInfo) -> str | None:
        start: str | None = known.data.get("from_version")
        if before and start and parse_version(before) <= parse_version(start):
            raise ValueError(f"{before} is not after from_version, {start}")
        return before

    def covers(self, os_version: str) -> bool:
        """Return True if `os_version` lies in this limit's range."""
        version = parse_version(os_version)
        before = self.before_version
        return parse_version(self.from_version) <= version and (before is None or version < parse_version(before))

    def versions(self) -> str:
        """Return the range as text."""
        return f"from {self.from_version}" + (f", before {self.before_version}" if self.before_version else "")


class Budget(NamedTuple):
    """The bytes that one app may use, with the reason: `private_bytes` charged to it, `total_bytes` in RAM.

    If a GPU has its own memory, both count that memory, and `host_bytes` counts the RAM of its host.
    """

    private_bytes: int
    total_bytes: int
    why: str
    host_bytes: int | None = None


class DeviceProfile(Frozen):
    """One device, as a profile file describes it."""

    name: DeviceName
    title: Title
    kind: DeviceKind
    os: Os
    os_version: OsVersion  # assumed by plans that name none
    chip: Title
    ram: SourcedBytes
    vram: SourcedBytes | None = None  # memory of a discrete GPU, which holds the models
    reserve: SourcedBytes  # for the OS and other programs: part of `vram` or, without a discrete GPU, of `ram`
    app_limits: tuple[AppLimit, ...] = ()
    runtime_base: dict[Word, SourcedBytes] = Field(
        default_factory=dict
    )  # runtime memory measured on this device, by target.backend
    peak_bandwidth_gb_s: SourcedNumber
    usable_bandwidth_gb_s: SourcedNumber  # reached by decoding; never above peak
    # The same by processor (`cpu`, `gpu`) or by target.backend, where engines differ. A profile without keeps its hash.
    engines: dict[Word, EngineFigures] = Field(default_factory=dict, exclude_if=not_)
    fp32_tflops: SourcedNumber | None = None
    fp16_tflops: SourcedNumber | None = None
    int8_tops: SourcedNumber | None = None
    cores: SourcedCount  # usable by one process
    # The fastest number of threads, e.g. one for each big core; None: one for each core.
    threads: Annotated[SourcedCount | None, Field(exclude_if=not_)] = None
    simd: tuple[Word, ...] = ()
    targets: dict[Word, tuple[Word, ...]]  # target → backends that run here, best first: {"onnx": ["cuda", "cpu"]}
    measured: Annotated[tuple[PublishedSpeed, ...], Field(exclude_if=not_)] = ()
    notes: tuple[Title, ...] = ()

    def engine_figures(self, target: str, backend: str) -> tuple[SourcedNumber, SourcedNumber | None]:
        """Return GB/s and milliseconds per layer, measured with this engine, or else with any on the same processor."""
        names = (f"{target}.{backend}", "gpu" if backend in GPU_BACKENDS else "cpu")
        known = [self.engines[name] for name in names if name in self.engines]
        bandwidths = (each.bandwidth_gb_s for each in known if each.bandwidth_gb_s)
        layers = (each.layer_ms for each in known if each.layer_ms)
        return next(bandwidths, self.usable_bandwidth_gb_s), next(layers, None)

    def calibrated(self, target: str, backend: str) -> Spread | None:
        """Return the spread of what was measured with this engine; None if it was not calibrated."""
        figures = self.engines.get(f"{target}.{backend}")
        return figures.spread if figures else None

    @property
    def cpu_cores(self) -> int:
        """The number of cores usable by one process."""
        return self.cores.value

    @field_validator("reserve")
    @classmethod
    def _something_is_left(cls, reserve: SourcedBytes, known: ValidationInfo) -> SourcedBytes:
        memory: SourcedBytes | None = known.data.get("vram") or known.data.get("ram")
        if memory is not None and reserve.value >= memory.value:
            raise ValueError(f"leaves nothing of the {show_bytes(memory.value)} of memory")
        return reserve

    @field_validator("app_limits")
    @classmethod
    def _limits_agree(cls, limits: tuple[AppLimit, ...], known: ValidationInfo) -> tuple[AppLimit, ...]:
        ram: SourcedBytes | None = known.data.get("ram")
        for index, limit in enumerate(limits):
            if ram is not None and limit.limit.value > ram.value:
                raise ValueError(f"{show_bytes(limit.limit.value)} for one app is more than ram")
            for other in limits[:index]:
                if other.entitlement == limit.entitlement and _overlap(other, limit):
                    whom = limit.entitlement or "apps without an entitlement"
                    raise ValueError(f"versions {other.versions()} and {limit.versions()} overlap for {whom}")
        return limits

    @field_validator("usable_bandwidth_gb_s", "engines")
    @classmethod
    def _reached_is_within_peak(cls, given: Any, known: ValidationInfo) -> Any:
        peak: SourcedNumber | None = known.data.get("peak_bandwidth_gb_s")
        reached = [each.bandwidth_gb_s for each in given.values()] if isinstance(given, dict) else [given]
        for number in reached:
            if peak is not None and number is not None and number.value > peak.value:
                raise ValueError(f"{number.value:g} is more than peak_bandwidth_gb_s, {peak.value:g}")
        return given

    @field_validator("measured")
    @classmethod
    def _measured_engines_run(cls, rows: tuple[PublishedSpeed, ...], known: ValidationInfo) -> Any:
        targets: dict[str, tuple[str, ...]] = known.data.get("targets") or {}
        for row in rows:
            target, _, backend = row.engine.partition(".")
            if backend not in targets.get(target, ()):
                raise ValueError(f"{row.engine} is no engine of `targets`; write llamacpp.cpu, for example")
            if row.decode_tokens_per_s is None and row.prefill_tokens_per_s is None:
                raise ValueError(f"{row.model}: has neither decode_tokens_per_s nor prefill_tokens_per_s")
        return rows

    def budget(self, os_version: str | None = None, entitlements: frozenset[str] = frozenset()) -> Budget:
        """Return the budget of one app; `os_version` None takes the profile's."""
        version = os_version or self.os_version
        parse_version(version)
        if self.vram is not None:
            room = self.vram.value - self.reserve.value
            why = f"{self._room('GPU memory', self.vram)}; weights and cache must fit in it"
            return Budget(room, room, why, self.ram.value - self.ram.value // HOST_RESERVE)
        room = self.ram.value - self.reserve.value
        limit, how = self._limit(version, entitlements)
        if limit is None:
            return Budget(room, room, f"{self._room('RAM', self.ram)}{how}")
        allowed = limit.limit.value
        why = f"{how} ({limit.limit.confidence}: {limit.limit.source}); {self._room('RAM', self.ram)}"
        if limit.counts == "private":
            return Budget(allowed, room, f"{why}; clean pages mapped from files are not charged to the app")
        return Budget(min(allowed, room), min(allowed, room), f"{why}; pages mapped from files are charged too")

    def _limit(self, version: str, entitlements: frozenset[str]) -> tuple[AppLimit | None, str]:
        """Return the applicable limit and its explanation; an unknown version gets the lowest known limit."""
        granted = {name.removeprefix(_APPLE_PREFIX) for name in entitlements}
        open_to_all = [limit for limit in self.app_limits if limit.entitlement is None]
        granting = [limit for limit in self.app_limits if limit.entitlement in granted]
        where = f"{OS_TITLES[self.os]} {version}"
        for limits in (granting, open_to_all):
            covering = [limit for limit in limits if limit.covers(version)]
            if covering:
                best = max(covering, key=lambda limit: limit.limit.value)
                having = f" with {best.entitlement}" if best.entitlement else ""
                return best, f"{where} lets one app{having} use {show_bytes(best.limit.value)}"
        if open_to_all:
            worst = min(open_to_all, key=lambda limit: limit.limit.value)
            known = "; ".join(limit.versions() for limit in open_to_all)
            allowed = show_bytes(worst.limit.value)
            return worst, f"no limit is known for {where} (known: {known}), so the lowest known one is used, {allowed}"
        if self.os in ("ios", "ipados"):
            return (
                None,
                f"; no limit for one app is known under {where}: measure os_proc_available_memory on the device",
            )
        if self.os == "android":
            return (
                None,
                "; no fixed limit for one app: lmkd kills by memory pressure, the biggest background apps first",
            )
        return None, ""

    def _room(self, what: str, memory: SourcedBytes) -> str:
        left = show_bytes(memory.value - self.reserve.value)
        return f"{what} {show_bytes(memory.value)} less {show_bytes(self.reserve.value)} kept for others leaves {left}"


def check_entitlements(names: Iterable[str], profiles: Iterable[DeviceProfile]) -> None:
    """Raise `InvalidInput` for an entitlement that no limit of these devices depends on: probably a misspelling."""
    known = {limit.entitlement for profile in profiles for limit in profile.app_limits if limit.entitlement}
    for name in names:
        if name.removeprefix(_APPLE_PREFIX) not in known:
            raise UnknownName("entitlement", name, known)


OS_TITLES: dict[str, str] = {
    "ios": "iOS",
    "ipados": "iPadOS",
    "android": "Android",
    "macos": "macOS",
    "linux": "Linux",
    "windows": "Windows",
}


def _overlap(one: AppLimit, other: AppLimit) -> bool:
    first, second = sorted((one, other), key=lambda limit: parse_version(limit.from_version))
    return first.before_version is None or parse_version(second.from_version) < parse_version(first.before_version)
