"""Several models in one memory budget: opened once, closed when unused, and never under a running answer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from runtimes import make_runtime
from serving import Served, SlowEngine, eventually, serving

from edgekit.apps.serve import app, on_demand
from edgekit.apps.serve.pool import ModelPool, OnDemand, PooledModel, PoolSettings
from edgekit.apps.serve.problems import ApiError
from edgekit.errors import DoesNotFit, InvalidInput
from edgekit.runtime.runtime import Runtime

BASE = 100  # bytes of the process
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 200}


class Shelf:
    """Models that count how often they are opened, and how many are open at a time."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.allowed: list[int | None] = []
        self.runtimes: dict[str, Runtime] = {}

    def model(self, name: str, size: int, seconds: float = 0.0) -> OnDemand:
        """A model that adds `size` bytes to the process."""

        def open_it(memory: int | None) -> Runtime:
            self.opened.append(name)
            self.allowed.append(memory)
            self.runtimes[name] = make_runtime(SlowEngine(seconds))
            return self.runtimes[name]

        return OnDemand(open_it, size + BASE, BASE, context=512, sequences=4)

    def pool(self, sizes: dict[str, int], most: int, **limits: Any) -> ModelPool:
        models = [PooledModel(name, self.model(name, size)) for name, size in sizes.items()]
        return ModelPool(models, PoolSettings(most + BASE, measure=lambda: (BASE, None), **limits))


def test_a_model_is_opened_once_for_many_calls() -> None:
    shelf = Shelf()

    async def use() -> None:
        pool = shelf.pool({"a": 10}, 10)

        async def call() -> None:
            async with pool.using(pool.models[0]):
                assert pool.models[0].runtime is not None

        await asyncio.gather(*(call() for _ in range(20)))
        await pool.close()

    asyncio.run(use())
    assert shelf.opened == ["a"]
    assert shelf.allowed == [10 + BASE]


def test_the_least_recently_used_model_makes_room() -> None:
    shelf = Shelf()

    async def use() -> None:
        pool = shelf.pool({"a": 10, "b": 10, "c": 10, "all": 30}, 30)
        by_name = {model.name: model for model in pool.models}
        for name in "abcab":
            async with pool.using(by_name[name]):
                pass
        async with pool.using(by_name["a"]):
            assert [model.name for model in pool.models if model.runtime] == ["a", "b", "c"]
        by_name["c"].last_used += 100  # now `b` is the oldest
        async with pool.using(by_name["all"]):
            assert [model.name for model in pool.models if model.runtime] == ["all"]
            assert sum(model.taken_bytes for model in pool.models) == 30
        async with pool.using(by_name["b"]):
            assert [model.name for model in pool.models if model.runtime] == ["b"]
        await pool.close()

    asyncio.run(use())
    assert shelf.opened == ["a", "b", "c", "all", "b"]


def test_a_model_in_use_is_waited_for_and_never_closed() -> None:
    shelf = Shelf()

    async def use() -> None:
        pool = shelf.pool({"a": 10, "b": 10}, 15, wait_s=20)
        first, second = pool.models
        async with pool.using(first):
            use = pool.using(second)
            waiting = asyncio.create_task(use.__aenter__())
            for _ in range(20):
                await asyncio.sleep(0)
            assert first.state == "ready"
            assert second.state == "loading"
        await waiting
        assert (first.state, second.state) == ("absent", "ready")

    asyncio.run(use())
    assert shelf.opened == ["a", "b"]


def test_busy_models_are_named_in_the_refusal() -> None:
    shelf = Shelf()

    async def use() -> None:
        pool = shelf.pool({"a": 10, "b": 10, "small": 5}, 15, wait_s=0)
        first, second, small = pool.models
        async with pool.using(first), pool.using(small):
            with pytest.raises(ApiError) as refused:
                async with pool.using(second):
                    pass
            assert (refused.value.status, refused.value.code) == (503, "server_overloaded")
            assert "answers of a, small are running" in str(refused.value)
            assert refused.value.headers["retry-after"] == "5"
        async with pool.using(second):  # nothing is held against it
            assert second.runtime is not None
        await pool.close()

    asyncio.run(use())


def test_an_unused_model_is_closed_after_a_while_and_opened_again() -> None:
    shelf = Shelf()

    async def use() -> None:
        pool = shelf.pool({"a": 10}, 10, keep_alive_s=0.01)
        model = pool.models[0]
        for _ in range(2):
            async with pool.using(model):
                await asyncio.sleep(0.05)
                assert model.state == "ready"
            while model.state != "absent":
                await asyncio.sleep(0.01)
            assert model.taken_bytes == 0
        assert (model.loads, model.unloads) == (2, 2)

    asyncio.run(use())


def test_a_model_that_is_asked_for_while_it_is_closed_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    is_trimming, may_end = threading.Event(), threading.Event()

    def slowly() -> None:
        is_trimming.set()
        may_end.wait(20)

    monkeypatch.setattr("edgekit.apps.serve.pool.return_unused", slowly)

    async def use() -> None:
        pool = shelf.pool({"a": 10}, 10, keep_alive_s=0.01)
        model = pool.models[0]

        async def answer() -> None:
            async with pool.using(model):
                await asyncio.sleep(0.05)
                assert model.taken_bytes == 10

        await answer()
        assert await asyncio.to_thread(is_trimming.wait, 20)
        assert model.state == "unloading"
        second = asyncio.create_task(answer())
        await asyncio.sleep(0.02)
        may_end.set()
        await second
        assert model.loads == 2

    asyncio.run(use())


def test_a_model_that_cannot_be_opened_is_tried_again_later() -> None:
    attempts = 0

    def failing(memory: int | None) -> Runtime:
        nonlocal attempts
        attempts += 1
        raise DoesNotFit("9 GiB are needed") if attempts == 1 else OSError("/a/secret/path")

    async def use() -> None:
        model = PooledModel("a", OnDemand(failing, 10))
        pool = ModelPool([model])
        messages = []
        for _ in range(3):
            with pytest.raises(ApiError) as refused:
                async with pool.using(model):
                    pass
            messages.append(str(refused.value))
            if len(messages) == 2:
                model.failed = model.failed._replace(retry_at=0.0)
        assert messages[0] == messages[1] == "a does not fit: 9 GiB are needed"
        assert "secret" not in messages[2]
        assert attempts == 2

    asyncio.run(use())


def test_callers_that_leave_cancel_nothing_for_the_others() -> None:
    shelf = Shelf()

    async def use() -> None:
        pool = shelf.pool({"a": 10, "b": 10}, 10, wait_s=20)
        first, second = pool.models
        async with pool.using(first):
            uses = [pool.using(second) for _ in range(3)]
            callers = [asyncio.create_task(use.__aenter__()) for use in uses]
            await asyncio.sleep(0.01)
            callers[0].cancel()
            await asyncio.sleep(0.01)
        await asyncio.gather(*callers, return_exceptions=True)
        assert [caller.cancelled() for caller in callers] == [True, False, False]
        assert second.users == 2
        assert shelf.opened == ["a", "b"]

    asyncio.run(use())


def test_random_use_never_exceeds_the_budget_nor_closes_what_is_used() -> None:
    shelf = Shelf()

    async def use() -> None:
        pool = shelf.pool({"a": 10, "b": 7, "c": 12, "d": 3}, 20, wait_s=60, keep_alive_s=0.002)

        async def caller(number: int) -> None:
            for turn in range(12):
                model = pool.models[(number * 7 + turn * (number + 1)) % 4]
                async with pool.using(model):
                    for _ in range(number):
                        await asyncio.sleep(0.001)
                        assert model.state == "ready"
                        assert sum(each.taken_bytes for each in pool.models) <= 20

        await asyncio.gather(*(caller(number) for number in range(1, 7)))
        await pool.close()
        assert all(not model.users for model in pool.models)

    asyncio.run(use())


def post(served: Served, model: str, **change: Any) -> httpx.Response:
    return httpx.post(f"{served.v1}/chat/completions", json={**LONG, "model": model, **change}, timeout=60)


def test_server_opens_models_on_demand_and_reports_open_ones() -> None:
    shelf = Shelf()
    models = {"a": shelf.model("a", 10, 0.005), "b": shelf.model("b", 10)}
    pool = PoolSettings(15 + BASE, measure=lambda: (BASE, None))
    with serving(models, pool=pool, ollama=True) as served:

        def states() -> dict[str, str]:
            return {each["id"]: each["status"] for each in httpx.get(f"{served.v1}/models").json()["data"]}

        assert states() == {"a": "absent", "b": "absent"}
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(post(served, "a")))
        thread.start()
        eventually(lambda: states()["a"] == "ready")
        assert post(served, "b", max_tokens=3).status_code == 200  # waits until `a` has answered
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 200
        assert states() == {"a": "absent", "b": "ready"}
        assert httpx.get(f"{served.url}/readyz").json()["models"] == {"a": "absent", "b": "ready"}
        metrics = httpx.get(f"{served.url}/metrics").text
        assert 'edgekit_model_open{model_name="a"} 0' in metrics
        assert 'edgekit_model_unloads_total{model_name="a"} 1' in metrics
        assert [each["name"] for each in httpx.get(f"{served.url}/api/ps").json()["models"]] == ["b"]
        unload = {"model": "b", "messages": [], "keep_alive": 0}
        assert httpx.post(f"{served.url}/api/chat", json=unload).json()["done_reason"] == "unload"
        eventually(lambda: states() == {"a": "absent", "b": "absent"})
    assert shelf.opened == ["a", "b"]


def test_on_demand_checks_its_options(tmp_path: Any) -> None:
    with pytest.raises(InvalidInput, match="memory: the server divides"):
        on_demand(tmp_path, memory="1GiB")
    with pytest.raises(InvalidInput, match="did you mean context"):
        on_demand(tmp_path, contxt=3)
    assert callable(app)
