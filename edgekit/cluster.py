"""Work that does not depend on each other, done here one after the other, or spread over a Ray cluster.

It knows no exports: whoever has tasks gives what is done with each. A machine that is measured belongs to no cluster,
since Ray's own processes take memory and time on it.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

from edgekit.errors import EdgekitError, InvalidInput, TargetFailed, TargetMissing, clip
from edgekit.files import write_file
from edgekit.interfaces import Progress

HERE = "local"
_STORE_BYTES = 128 << 20  # nothing large goes through it; Ray would take 30 % of the memory
_RETRIES, _CONNECT_S = 2, 10.0

Task = TypeVar("Task")
Found = TypeVar("Found")


class Fan(Protocol):
    def __call__(
        self, do: Callable[[Task, Progress], Found], tasks: Sequence[Task], progress: Progress
    ) -> list[Found | EdgekitError]:
        """What `do` found for each task, in their order, or why it refused; anything else that it raises is raised."""


def in_order(
    do: Callable[[Task, Progress], Found], tasks: Sequence[Task], progress: Progress
) -> list[Found | EdgekitError]:
    """The fan of one machine."""
    return [_tried(do, task, progress) for task in tasks]


def fan_of(address: str | None, folders: Sequence[Path]) -> AbstractContextManager[Fan]:
    """`in_order`, or the Ray cluster at `address`; `local` starts one here. All its nodes must see the folders."""
    return nullcontext(in_order) if address is None else _cluster(address, folders)


@contextmanager
def _cluster(address: str, folders: Sequence[Path]) -> Iterator[Fan]:
    _check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise TargetMissing(f"ray: {error}; pip install 'edgekit[ray]'") from error
    known: dict[str, Any] = {"include_dashboard": False, "object_store_memory": _STORE_BYTES} if address == HERE else {}
    try:
        ray.init(address, log_to_driver=False, logging_level="error", **known)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(f"ray: no cluster at {clip(address)}: {first[:300]}; `local` starts one here") from error
    try:
        _check_nodes(ray, folders)
        yield _Cluster(ray)
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Ray tries for minutes where nobody listens, and ends the process then."""
    if address in (HERE, "auto"):
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInput(f"ray: address {clip(address)}: give HOST:PORT of the cluster's head, `auto` or `local`")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise InvalidInput(f"ray: nobody answers at {clip(address)}: {error}; `local` starts a cluster here") from error


class _Cluster:
    """The fan of a cluster: one task a processor, however many nodes have one."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def __call__(
        self, do: Callable[[Task, Progress], Found], tasks: Sequence[Task], progress: Progress
    ) -> list[Found | EdgekitError]:
        ray = self._ray
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_there)
        waiting = {remote.remote(do, task): place for place, task in enumerate(tasks)}
        found: dict[int, Found | EdgekitError] = {}
        name = "on the cluster"
        progress(0, len(tasks), name)
        while waiting:
            for reference in ray.wait(list(waiting), timeout=1.0)[0]:
                found[waiting.pop(reference)] = self._fetched(reference)
                progress(len(found), len(tasks), name)
        return [found[place] for place in range(len(tasks))]

    def _fetched(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            value, refused = self._ray.get(reference)
        except (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        ) as lost:
            words = (str(lost).strip().splitlines() or [type(lost).__name__])[0]
            return TargetFailed(f"ray: its worker was lost {_RETRIES + 1} times: {words[:300]}")
        return value if refused is None else TargetFailed(refused)


def _there(do: Callable[[Task, Progress], Found], task: Task) -> tuple[Found | None, str | None]:
    """One task, in a worker. Errors cross as words: not all of ours can be pickled."""
    found = _tried(do, task, lambda *_: None)
    return (None, str(found)) if isinstance(found, EdgekitError) else (found, None)


def _tried(do: Callable[[Task, Progress], Found], task: Task, progress: Progress) -> Found | EdgekitError:
    try:
        return do(task, progress)
    except EdgekitError as error:
        return error


def _check_nodes(ray: Any, folders: Sequence[Path]) -> None:
    """Every node has this edgekit and sees the same folders; refused before any work where one does not."""
    from importlib.metadata import version

    ours, marks = version("edgekit"), []
    try:
        for folder in folders:
            marks.append(folder / f".edgekit-{secrets.token_hex(8)}")
            write_file(marks[-1], b"here\n")
        probe = ray.remote(num_cpus=0)(_seen)
        alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        asked = [
            (node["NodeManagerHostname"], probe.options(scheduling_strategy=strategy(node["NodeID"], soft=False)))
            for node in alive
        ]
        for name, reference in [(name, there.remote(marks)) for name, there in asked]:
            try:
                theirs, missing = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                raise InvalidInput(
                    f"ray: node {name} cannot run edgekit: {clip(error.cause)}; install it there"
                ) from error
            if theirs != ours:
                raise InvalidInput(f"ray: node {name} has edgekit {theirs} and this machine {ours}; install the same")
            if missing:
                raise InvalidInput(
                    f"ray: node {name} does not see {missing[0].parent}; give a folder that all nodes share"
                    " (models and `EDGEKIT_HOME` too)"
                )
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


def _seen(marks: Sequence[Path]) -> tuple[str, list[Path]]:
    from importlib.metadata import version

    return version("edgekit"), [mark for mark in marks if not mark.exists()]
