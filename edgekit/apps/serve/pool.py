"""Models in one memory budget: opened on request, closed when another one needs their memory.

A model is never closed while a call uses it. Many calls for a closed model open it once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

from edgekit import Artifact, AsyncRuntime, OpenOptions, Runtime, open as open_runtime, predict_opening
from edgekit.apps.serve.problems import ApiError, api_error
from edgekit.apps.serve.settings import ServerSettings
from edgekit.common.footprint import footprint, return_unused
from edgekit.common.free_memory import free_memory
from edgekit.common.log import log
from edgekit.common.options import one_of
from edgekit.common.units import show_bytes
from edgekit.errors import DoesNotFit, EdgekitError, InvalidInput

_KEEP_ALIVE_S = 300.0  # default if several models are served
ModelState = Literal["ready", "loading", "unloading", "absent"]
_SAVE_AFTER_S = 2.0  # seconds without a call
_BACKOFF_S = (1, 5, 30)  # before the next try to open a model, after its first, second and every later failure


class OnDemand(NamedTuple):
    """A model that a server opens when a request needs it; `on_demand` makes it from an artifact."""

    open: Callable[[int | None], Runtime]  # takes the limit of the process's private bytes; None: no limit
    private_bytes: int  # predicted for a process that opens only this model
    runtime_bytes: int = 0  # the part that several models share: interpreter and vendor library
    context: int = 0
    sequences: int = 1
    adapters: tuple[str, ...] = ()
    artifact: Artifact | None = None


def on_demand(
    path: str | Path,
    options: OpenOptions | None = None,
    *,
    adapters: Mapping[str, str | Path | None] | None = None,
    **opening: Any,
) -> OnDemand:
    """Describe an artifact that a server opens when a request needs it.

    Args:
        path: the artifact's folder.
        adapters: LoRA adapters by name: their PEFT folders; None for one that is sealed in the artifact.
        options, opening: as in `edgekit.open`, except `memory`, which the server decides.
    """
    options = one_of(options, OpenOptions, opening)
    if options.memory is not None:
        raise InvalidInput("memory: the server divides its own among its models; set it there")
    predicted = predict_opening(path, options)

    def opened(memory: int | None) -> Runtime:
        runtime = open_runtime(path, options.model_copy(update={"memory": memory}))
        try:
            for name, folder in (adapters or {}).items():
                runtime.load_adapter(name, folder)
        except BaseException:
            runtime.close()
            raise
        return runtime

    return OnDemand(
        opened,
        predicted.estimate.private_bytes,
        predicted.estimate.runtime_bytes,
        predicted.config.kv_config.capacity_tokens,
        predicted.config.sequences,
        tuple(adapters or ()),
        predicted.artifact,
    )


class FailedOpening(NamedTuple):
    """The last attempt to open a model, how many failed in a row, and when the next one may be made."""

    error: ApiError
    attempts: int
    retry_at: float


class PooledModel:
    """A model of a pool: its runtime if it is open, and the number of calls that use it."""

    def __init__(self, name: str, source: Runtime | AsyncRuntime | OnDemand) -> None:
        self.name = name
        self.source = source if isinstance(source, OnDemand) else None
        self.runtime: AsyncRuntime | None = None  # None: it is not open
        if not isinstance(source, OnDemand):
            self.runtime = source if isinstance(source, AsyncRuntime) else AsyncRuntime(source)
        self.users = 0  # calls that use it or wait for it
        self.loads = self.unloads = 0
        self.load_s = 0.0  # total seconds of all loads
        self.last_used = 0.0
        self.taken_bytes = 0  # of the pool's memory
        self.keep_alive_s: float | None = None  # None: the pool's setting
        self.change: asyncio.Task[None] | None = None  # the task that opens or closes it
        self.expiry: asyncio.TimerHandle | None = None  # will close it
        self.saving: asyncio.TimerHandle | None = None  # will save its prefixes
        self.failed: FailedOpening | None = None  # None: the last attempt to open it succeeded

    @property
    def state(self) -> ModelState:
        if self.change is None:
            return "absent" if self.runtime is None else "ready"
        return "loading" if self.loads == self.unloads else "unloading"

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.runtime.runtime.kv_config.capacity_tokens if self.runtime else self._planned.context

    @property
    def sequences(self) -> int:
        """The number of answers that run together."""
        return self.runtime.runtime.sequences if self.runtime else self._planned.sequences

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of its adapters."""
        return tuple(self.runtime.runtime.adapters) if self.runtime else self._planned.adapters

    @property
    def artifact(self) -> Artifact | None:
        return self.runtime.runtime.artifact if self.runtime else self._planned.artifact

    @property
    def predicted_bytes(self) -> int:
        """Predicted private bytes of a process with this model alone; 0 if nothing was predicted."""
        if self.source is None:
            artifact = self.artifact
            return self.runtime.runtime.memory().predicted_private_bytes if self.runtime and artifact else 0
        return self.source.private_bytes

    @property
    def is_closable(self) -> bool:
        """True if nothing uses it now and it can be opened again later."""
        return self.source is not None and self.runtime is not None and not self.users and self.change is None

    @property
    def _planned(self) -> OnDemand:
        assert self.source is not None
        return self.source


class PoolSettings(NamedTuple):
    """The limits of a pool, where it keeps prefixes, and how memory is measured."""

    memory: int | None = None  # private bytes of the process; None: limited by free memory only
    keep_alive_s: float | None = None  # an unused model is closed after this time; None: never
    wait_s: float = 30.0  # most seconds to wait for running answers of other models
    prefixes: Path | None = None  # the folder of saved prefixes; None: they are not saved
    measure: Callable[[], tuple[int, int | None]] = lambda: (footprint().private_bytes or 0, _free_bytes())


def pool_settings(settings: ServerSettings, models: int) -> PoolSettings:
    """Return the pool settings of a server with `models` models."""
    keep_alive_s = _KEEP_ALIVE_S if settings.keep_alive_s is None and models > 1 else settings.keep_alive_s
    return PoolSettings(settings.memory, keep_alive_s, prefixes=settings.prefixes)


class ModelPool:
    """Opens and closes models so that the predicted memory of all open ones fits. Used by one event loop only."""

    def __init__(self, models: Iterable[PooledModel], settings: PoolSettings | None = None) -> None:
        self.models = tuple(models)
        self._settings = settings or PoolSettings()
        given = sum(model.predicted_bytes for model in self.models if model.source is None)
        self._base_bytes = max(self._settings.measure()[0], given)  # the process with its permanent models
        self._changed = asyncio.Event()
        self._background: asyncio.Future[None] | None = None
        self._tells_failures = True  # of saving prefixes, once

    def open_now(self, model: PooledModel) -> None:
        """Open a model before the event loop runs."""
        assert model.source is not None
        own = self._own_bytes(model)
        model.runtime = AsyncRuntime(self._restored(model.source.open(self._limit())))
        model.taken_bytes, model.loads = own, 1

    @asynccontextmanager
    async def using(self, model: PooledModel) -> AsyncIterator[None]:
        """Open the model if it is not, and keep it open until the block ends."""
        model.users += 1
        if model.expiry is not None:
            model.expiry.cancel()
        try:
            while model.runtime is None or model.change is not None:
                if model.change is None:
                    if model.failed is not None and monotonic() < model.failed.retry_at:
                        raise model.failed.error
                    model.change = asyncio.create_task(self._open(model))
                    model.change.add_done_callback(_retrieved)
                await asyncio.shield(model.change)
            yield
        finally:
            model.users -= 1
            model.last_used = monotonic()
            self._tell()
            if model.is_closable and model.runtime is not None and model.runtime.failure is not None:
                model.change = asyncio.create_task(self._close(model))  # the next call opens it again
            self._expire_later(model)
            self._save_later(model)

    async def close(self) -> None:
        """Close every model."""
        for model in self.models:
            if model.expiry is not None:
                model.expiry.cancel()
            if model.change is not None:
                await asyncio.wait({model.change})
            if model.saving is not None:
                model.saving.cancel()
            if model.runtime is not None:
                await asyncio.to_thread(self._save, model.runtime.runtime)
                await model.runtime.close()

    async def _open(self, model: PooledModel) -> None:
        assert model.source is not None
        began = monotonic()
        try:
            allowed = await self._room_for(model)
            log.info("opening %s", model.name)
            source = model.source
            model.runtime = AsyncRuntime(await asyncio.to_thread(lambda: self._restored(source.open(allowed))))
            model.failed = None
            model.loads += 1
            model.load_s += monotonic() - began
        except ApiError:
            raise  # no room now: the next call tries again
        except Exception as error:
            before = model.failed.attempts if model.failed else 0
            wait_s = _BACKOFF_S[min(before, len(_BACKOFF_S) - 1)]
            model.failed = FailedOpening(_failed(model, error, wait_s), before + 1, monotonic() + wait_s)
            log.error("%s cannot be opened: %s", model.name, error)
            raise model.failed.error from None
        finally:
            model.change = None
            if model.runtime is None:
                model.taken_bytes = 0
            self._tell()
            self._expire_later(model)

    async def _room_for(self, model: PooledModel) -> int | None:
        """Reserve the memory of a model, closing unused models; return the bytes that the process may have."""
        assert model.source is not None
        until = monotonic() + self._settings.wait_s
        while True:
            limit = self._limit()
            if limit is None:
                return None
            others = sum(each.taken_bytes for each in self.models if each is not model)
            # A model too large even alone gets all memory: it opens with less cache, or its error says what it needs.
            needed = min(self._own_bytes(model), limit - self._base_bytes)
            missing = needed - (limit - self._base_bytes - others)
            if missing <= 0:
                model.taken_bytes = max(0, needed)
                return limit - others
            idle = sorted((each for each in self.models if each.is_closable), key=lambda each: each.last_used)
            if sum(each.taken_bytes for each in idle) >= missing:
                await self._close_unused(idle[0])
                continue
            remaining = until - monotonic()
            if remaining <= 0 or not model.users:
                busy = ", ".join(each.name for each in self.models if each.taken_bytes and each not in (model, *idle))
                raise ApiError(
                    503,
                    f"{model.name} needs {show_bytes(needed)}, {show_bytes(missing)} more than is free, while answers "
                    f"of {busy or 'another model'} are running; try again in 5 s",
                    code="server_overloaded",
                    retry_after_s=5,
                )
            await self._next_change(remaining)

    async def _close_unused(self, model: PooledModel) -> None:
        """Close a model that nothing uses, and return its memory to the system."""
        model.change = asyncio.create_task(self._close(model))
        await asyncio.shield(model.change)

    async def _close(self, model: PooledModel) -> None:
        runtime = model.runtime
        assert runtime is not None
        log.info("closing %s", model.name)
        try:
            await asyncio.to_thread(self._save, runtime.runtime)
            await runtime.close()
        finally:
            model.runtime = None
            del runtime
            await asyncio.to_thread(return_unused)
            # Only now may a waiting call open it again: it takes the memory that is given back here.
            model.taken_bytes, model.change = 0, None
            model.unloads += 1
            self._tell()

    def _expire_later(self, model: PooledModel) -> None:
        keep_alive_s = self._settings.keep_alive_s if model.keep_alive_s is None else model.keep_alive_s
        if keep_alive_s is None or keep_alive_s < 0 or not model.is_closable:
            return

        def expire() -> None:
            if model.is_closable:
                model.change = asyncio.create_task(self._close(model))

        if model.expiry is not None:
            model.expiry.cancel()
        model.expiry = asyncio.get_running_loop().call_later(keep_alive_s, expire)

    def _save_later(self, model: PooledModel) -> None:
        """Save a model's prefixes when it has been idle for a while, so that they survive a kill of the process."""
        if model.saving is not None:
            model.saving.cancel()
        if self._settings.prefixes is None or model.users or model.runtime is None or model.change is not None:
            return
        runtime = model.runtime.runtime

        def save() -> None:
            if model.runtime is not None and model.runtime.runtime is runtime and not model.users:
                self._background = asyncio.ensure_future(asyncio.to_thread(self._save, runtime))

        model.saving = asyncio.get_running_loop().call_later(_SAVE_AFTER_S, save)

    def _prefix_file(self, runtime: Runtime) -> Path | None:
        if self._settings.prefixes is None or runtime.artifact is None:
            return None
        return self._settings.prefixes / f"{runtime.artifact.sha256[:32]}.prefixes"

    def _save(self, runtime: Runtime) -> None:
        file = self._prefix_file(runtime)
        if file is not None:
            try:
                runtime.save_prefixes(file)
            except (EdgekitError, OSError) as error:
                if self._tells_failures:
                    self._tells_failures = False
                    log.warning("prefixes are not kept: %s", error)

    def _restored(self, runtime: Runtime) -> Runtime:
        """Return the runtime after loading the prefixes that were saved for its artifact."""
        file = self._prefix_file(runtime)
        if file is not None and file.exists():
            try:
                log.info("%d prefixes restored", runtime.load_prefixes(file))
            except (EdgekitError, OSError) as error:
                log.warning("saved prefixes are not used: %s", error)
        return runtime

    def _own_bytes(self, model: PooledModel) -> int:
        """Return the private bytes of a model, less the bytes of an empty process."""
        assert model.source is not None
        return model.source.private_bytes - min(model.source.runtime_bytes, self._base_bytes)

    def _limit(self) -> int | None:
        """Return the limit of this process's private bytes; None if there is none."""
        private, free = self._settings.measure()
        limits = (self._settings.memory, None if free is None else free + private)
        return min((each for each in limits if each is not None), default=None)

    async def _next_change(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _tell(self) -> None:
        """Wake the calls that wait for memory."""
        self._changed.set()
        self._changed = asyncio.Event()


def _failed(model: PooledModel, error: Exception, wait_s: int) -> ApiError:
    """Return the error for calls to a model that cannot be opened."""
    if isinstance(error, DoesNotFit):
        message = f"{model.name} does not fit: {api_error(error).message}"
    else:
        message = f"{model.name} could not be opened ({type(error).__name__}); the server's log says why"
    return ApiError(503, message, code="model_failed", retry_after_s=wait_s)


def _retrieved(task: asyncio.Task[None]) -> None:
    """Read the error of a task, because all of its callers may have left."""
    if not task.cancelled():
        task.exception()


def _free_bytes() -> int | None:
    free = free_memory()
    return None if free is None else free.bytes
