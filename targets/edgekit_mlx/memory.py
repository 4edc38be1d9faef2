"""Where MLX computes here, and how much memory it may hold: its own limits, set from the plan.

On Apple silicon weights live in unified memory, and what is not wired can be paged out between tokens. MLX's memory
limit is no wall (it is not enforced), so nothing here relies on it: what fits was decided from the plan.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from edgekit.plan import Plan
from edgekit.units import MIB, show_bytes

_LEAST_CACHE_BYTES = 4 * MIB


class Prepared(NamedTuple):
    """Whether the GPU computes, and what its owner should know."""

    on_gpu: bool
    notes: tuple[str, ...]


def prepare(plan: Plan) -> Prepared:
    """Choose the device for this thread and set MLX's limits."""
    has_metal = bool(mx.metal.is_available())
    on_gpu = plan.backend == "metal" and has_metal
    mx.set_default_device(mx.gpu if on_gpu else mx.cpu)
    # Buffers that were freed are kept for the next step; more than one step's worth would break the plan's promise.
    mx.set_cache_limit(max(_LEAST_CACHE_BYTES, plan.estimate.activation_bytes))
    if plan.backend == "metal" and not has_metal:
        return Prepared(False, ("made for Metal and run on the CPU in float32: for checking, not for speed",))
    if not on_gpu:
        return Prepared(False, ())
    recommended = int(mx.device_info()["max_recommended_working_set_size"])
    limit, notes = wired_limit(plan, recommended)
    mx.set_wired_limit(limit)
    return Prepared(True, notes)


def wired_limit(plan: Plan, recommended_bytes: int) -> tuple[int, tuple[str, ...]]:
    """How much to keep resident: all that the plan holds, at most what Metal recommends; a note where that is less."""
    wanted = plan.estimate.total_bytes - plan.estimate.runtime_bytes
    if wanted <= recommended_bytes:
        return wanted, ()
    needed = -(-wanted // MIB)
    return recommended_bytes, (
        f"the plan holds {show_bytes(wanted)} and Metal keeps {show_bytes(recommended_bytes)} resident, so tokens will "
        f"wait for memory; `sudo sysctl iogpu.wired_limit_mb={needed}` raises that until the next restart",
    )
