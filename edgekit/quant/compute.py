"""The device that computes while weights are quantised: the processor, or a GPU that torch can use.

Weights are read and written by the processor; all that is computed from them is computed on the device. So one code
serves every device. edgekit's own runs were on processors: no GPU was ever tried.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

from edgekit.common.log import log
from edgekit.common.proc import cpuinfo
from edgekit.errors import InvalidInput, TargetFailed, Unsupported, quote_short
from edgekit.quant.reference_decoder import product

if TYPE_CHECKING:
    import torch

    from edgekit.quant.reference_decoder import Multiply

Compute = Literal["cpu", "cuda", "mps"]


def device_for(compute: Compute | torch.device | None) -> torch.device:
    """Return torch's device of this name; None: a GPU that torch finds, else the processor.

    Raises `Unsupported` for a device that torch does not find here.
    """
    import torch

    if isinstance(compute, torch.device):
        return compute
    if compute is None:
        return torch.device(next((name for name in ("cuda", "mps") if _is_here(name)), "cpu"))
    if compute not in get_args(Compute):
        raise InvalidInput(f"compute: must be {', '.join(get_args(Compute))}, found {quote_short(compute)}")
    if not _is_here(compute):
        raise Unsupported(f"compute {compute}: torch {torch.__version__} finds no such device here; leave it out")
    return torch.device(compute)


def _is_here(name: str) -> bool:
    import torch

    if name == "cuda":
        return torch.cuda.is_available()
    return name == "cpu" or torch.backends.mps.is_available()


def product_on(device: torch.device) -> Multiply:
    """Return how linears are multiplied on calibration text: in bfloat16 on a processor that has it, else in float32.

    The sums are in float32, and so is everything else. What bfloat16 rounds is a fraction of what four bits do.
    """
    return _in_bfloat16 if device.type == "cpu" and _has_bfloat16() else product


def _in_bfloat16(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    return functional.linear(inputs.bfloat16(), weights.bfloat16()).float()


@cache
def _has_bfloat16() -> bool:
    """Return True for processors with products of bfloat16; others would compute them in several steps."""
    flags = set(cpuinfo("flags", "Features").split())
    return not flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def notes_of(device: torch.device) -> tuple[str, ...]:
    """Return the note of weights that a GPU computed: other sums may round other integers than a processor's."""
    return () if device.type == "cpu" else (f"computed by torch on {device.type}, where edgekit was never tried",)


def on_device(compute: Compute | torch.device | None, do: Callable[[torch.device], None]) -> None:
    """Call `do` with the device. If torch fails on a GPU that nobody named, call it again with the processor.

    `do` must go on where it stopped. Raises `TargetFailed` for torch's errors on a named GPU, such as too little memory
    or a missing kernel.
    """
    import torch

    device = device_for(compute)
    try:
        do(device)
        return
    except RuntimeError as error:
        if device.type == "cpu":
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = f"compute {device.type}: torch: {lines[0][:300]}"
        if compute is not None:
            raise TargetFailed(f"{said}; with compute cpu, the same command continues from here") from error
    log.warning("%s; the processor goes on", said)
    do(torch.device("cpu"))
