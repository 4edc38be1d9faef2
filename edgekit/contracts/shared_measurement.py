"""Measurements to give away, as `bench --share` and `lab share` write them; no names of people or machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from edgekit.common.base import Frozen
from edgekit.common.bounds import Bits, Count, FileBytes, LayerCount, Share, Size, Threads, Tokens, Word
from edgekit.common.parsing import parse_json, read_bytes, validate
from edgekit.contracts.device import DeviceName
from edgekit.errors import InvalidInput, quote_short

SHARE_VERSION: Literal[1] = 1
MAX_SHARE_BYTES = 1 << 20


def _rising(rates: tuple[float, float, float]) -> tuple[float, float, float]:
    if not rates[0] <= rates[1] <= rates[2]:
        raise ValueError(f"{', '.join(f'{rate:g}' for rate in rates)} are not the lowest, the median and the highest")
    return rates


_Rate = Annotated[float, Field(ge=0.001, le=1e6, allow_inf_nan=False)]
_Rates = Annotated[tuple[_Rate, _Rate, _Rate], AfterValidator(_rising)]
_Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ()@.,+-]{0,99}\z")]


class SharedCase(Frozen):
    """One kind of request: its tokens, what a step read, and the tokens a second of its undisturbed trials."""

    prompt_tokens: Tokens
    depth_tokens: Count
    step_bytes: Annotated[int, Field(ge=1, le=1 << 50)]
    decode_tokens_per_s: _Rates
    prefill_tokens_per_s: _Rates | None = None


class SharedMeasurement(Frozen):
    """One artifact on one device."""

    device: DeviceName | None  # its profile; None: a machine without one
    processor: _Label
    os: _Label
    day: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d{2}-\d{2}\z")]
    engine: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,40}\.[a-z0-9_]{1,40}\z")]  # target.backend
    versions: dict[Word, _Label]
    family: Word
    parameters: Annotated[int, Field(ge=1, le=1 << 50)]
    layers: LayerCount
    hidden_size: Size
    recipe: Word
    threads: Threads
    context: Tokens
    kv_bits: Bits
    cases: Annotated[tuple[SharedCase, ...], Field(min_length=1, max_length=100)]
    private_bytes: FileBytes | None
    peak_bytes: FileBytes | None
    runtime_bytes: FileBytes | None  # before any model
    power: _Label | None
    temperature_c: Annotated[float, Field(ge=-50, le=150)] | None
    others_share: Share | None  # of all cores, used by other programs


class SharedFile(Frozen):
    """The content of a file."""

    version: Literal[1] = SHARE_VERSION
    measurements: Annotated[tuple[SharedMeasurement, ...], Field(min_length=1, max_length=1000)]


def read_shared(path: Path) -> SharedFile:
    """Read a file of shared measurements. Raises `InvalidInput` with one line."""
    data = read_bytes(path, MAX_SHARE_BYTES)
    version = parse_json(data, str(path)).get("version")
    if version != SHARE_VERSION:
        raise InvalidInput(
            f"{path}: version {quote_short(version)} of shared measurements, this edgekit reads {SHARE_VERSION};"
            " use the edgekit that wrote it, or share again"
        )
    return validate(data, SharedFile, str(path))
