"""Chooses MLX's device and sets its memory limits from the plan.

On Apple silicon, weights that are not wired can be paged out between tokens. MLX does not enforce its memory limit, so
only the plan ensures that the model fits.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from edgekit.common.units import MIB, show_bytes
from edgekit.contracts.plan import Plan

_LEAST_CACHE_BYTES = 4 * MIB


class Preparation(NamedTuple):
    """The result of `prepare`: whether MLX computes on the GPU, and the engine's notes."""

    on_gpu: bool
    notes: tuple[str, ...]


def prepare(plan: Plan) -> Preparation:
    """Choose the device for this thread and set MLX's limits."""
    has_metal = bool(mx.metal.is_available())
    on_gpu = plan.backend == "metal" and has_metal
    mx.set_default_device(mx.gpu if on_gpu else mx.cpu)
    # Keep freed buffers for the next step, but no more than one step needs, to stay within the plan.
    mx.set_cache_limit(max(_LEAST_CACHE_BYTES, plan.estimate.activation_bytes))
    if plan.backend == "metal" and not has_metal:
        return Preparation(False, ("made for Metal and run on the CPU in float32: for checking, not for speed",))
    if not on_gpu:
        return Preparation(False, ())
    recommended = int(mx.device_info()["max_recommended_working_set_size"])
    limit, notes = wired_limit(plan, recommended)
    mx.set_wired_limit(limit)
    return Preparation(True, notes)


def wired_limit(plan: Plan, recommended_bytes: int) -> tuple[int, tuple[str, ...]]:
    """Return the bytes to keep resident: the planned ones, up to Metal's recommended limit; with a note beyond it."""
    planned = plan.estimate.total_bytes - plan.estimate.runtime_bytes
    if planned <= recommended_bytes:
        return planned, ()
    needed = -(-planned // MIB)
    return recommended_bytes, (
        f"the plan holds {show_bytes(planned)} and Metal keeps {show_bytes(recommended_bytes)} resident, so tokens "
        f"will wait for memory; `sudo sysctl iogpu.wired_limit_mb={needed}` raises that until the next restart",
    )
