"""Runs independent tasks on a Ray cluster.

Measurements never run on a cluster, because Ray's own processes take memory and time on every node.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from edgekit.common.files import write_file
from edgekit.errors import EdgekitError, InvalidInput, TargetFailed, TargetMissing, quote_short

LOCAL = "local"
_STORE_BYTES = 128 << 20  # nothing large is passed through it; by default Ray takes 30 % of the memory
_RETRIES, _CONNECT_S = 2, 10.0

Job = TypeVar("Job")
Result = TypeVar("Result")


def results_on_ray(
    address: str, folders: Sequence[Path], do: Callable[[Job], Result], tasks: Sequence[Job]
) -> Generator[tuple[int, Result | EdgekitError]]:
    """Run tasks on the Ray cluster at `address`, as many concurrently as it has CPUs; its nodes must see `folders`.

    Yields the index of each task when it ends, in any order, with its result or the `EdgekitError` that it raised;
    other errors propagate. Close the iterator to leave the cluster early.
    """
    _check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise TargetMissing(f"ray: {error}; pip install 'edgekit[ray]'") from error
    known: dict[str, Any] = (
        {"include_dashboard": False, "object_store_memory": _STORE_BYTES} if address == LOCAL else {}
    )
    try:
        ray.init(address, log_to_driver=False, logging_level="error", **known)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(
            f"ray: no cluster at {quote_short(address)}: {first[:300]}; `local` starts one here"
        ) from error
    try:
        _check_nodes(ray, folders)
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_remote_task)
        waiting = {remote.remote(do, task): place for place, task in enumerate(tasks)}
        while waiting:
            for reference in ray.wait(list(waiting), timeout=1.0)[0]:
                yield waiting.pop(reference), _fetched(ray, reference)
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Check the address first, because Ray would retry for minutes and then end the process."""
    if address in (LOCAL, "auto"):
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInput(
            f"ray: address {quote_short(address)}: give HOST:PORT of the cluster's head, `auto` or `local`"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise InvalidInput(
            f"ray: no connection to {quote_short(address)}: {error}; `local` starts a cluster here"
        ) from error


def _fetched(ray: Any, reference: Any) -> Any:
    errors = ray.exceptions
    try:
        value, refused = ray.get(reference)
    except (
        errors.WorkerCrashedError,
        errors.NodeDiedError,
        errors.OutOfMemoryError,
        errors.ObjectLostError,
    ) as lost:
        words = (str(lost).strip().splitlines() or [type(lost).__name__])[0]
        return TargetFailed(f"ray: its worker was lost {_RETRIES + 1} times: {words[:300]}")
    return value if refused is None else TargetFailed(refused)


def _remote_task(do: Callable[[Job], Result], task: Job) -> tuple[Result | None, str | None]:
    """Run one task in a worker. Errors are returned as text, because not all of ours can be pickled."""
    try:
        return do(task), None
    except EdgekitError as error:
        return None, str(error)


def _check_nodes(ray: Any, folders: Sequence[Path]) -> None:
    """Raise `InvalidInput` unless every node has this version of edgekit and sees the same folders."""
    from importlib.metadata import version

    our_version, marks = version("edgekit"), []
    try:
        for folder in folders:
            marks.append(folder / f".edgekit-{secrets.token_hex(8)}")
            write_file(marks[-1], b"here\n")
        probe = ray.remote(num_cpus=0)(check_marks)
        alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        remote_tasks = [
            (node["NodeManagerHostname"], probe.options(scheduling_strategy=strategy(node["NodeID"], soft=False)))
            for node in alive
        ]
        for name, reference in [(name, remote_task.remote(marks)) for name, remote_task in remote_tasks]:
            try:
                their_version, missing = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                raise InvalidInput(
                    f"ray: node {name} cannot run edgekit: {quote_short(error.cause)}; install it there"
                ) from error
            if their_version != our_version:
                raise InvalidInput(
                    f"ray: node {name} has edgekit {their_version} and this machine {our_version}; install the same"
                )
            if missing:
                raise InvalidInput(
                    f"ray: node {name} does not see {missing[0].parent}; give a folder that all nodes share"
                    " (models and `EDGEKIT_HOME` too)"
                )
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


def check_marks(marks: Sequence[Path]) -> tuple[str, list[Path]]:
    from importlib.metadata import version

    return version("edgekit"), [mark for mark in marks if not mark.exists()]
