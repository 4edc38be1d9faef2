"""The examples that users copy run on the bundled demo model."""

from __future__ import annotations

import asyncio
import builtins
import json
import math
from pathlib import Path
from typing import Any

import pytest

import edgekit
from examples import extract, plan_and_export, score, stream_chat, tools, web_handler

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]


def test_plan_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert plan_and_export.will_it_fit("demo", ["iphone-16-pro", "raspberry-pi-5-8gb"]) == {
        "iphone-16-pro": True,
        "raspberry-pi-5-8gb": True,
    }
    plan_and_export.main("demo", str(tmp_path / "demo.edgekit"))
    shown = capsys.readouterr().out
    assert "read back bit for bit" in shown
    assert (tmp_path / "demo.edgekit" / "manifest.json").is_file()


def type_in(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer `input` with these lines, then with end of file."""
    waiting = iter(lines)

    def typed(prompt: str) -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", typed)


def test_stream_chat_keeps_the_conversation_until_the_context_is_full(
    demo: edgekit.Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(["Write a function that adds two numbers.", "", "Now subtract."], monkeypatch)
    messages = stream_chat.chat(demo)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    shown = capsys.readouterr().out
    assert messages[2]["content"] and messages[2]["content"] in shown
    type_in(["First.", "word " * 2000], monkeypatch)
    messages = stream_chat.chat(demo)
    assert [message["role"] for message in messages] == ["system"]
    assert "Ask again" in capsys.readouterr().out


def test_tools_only_write_valid_calls(demo: edgekit.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    text, calls = tools.next_turn(demo, [{"role": "user", "content": "What is 17 times 23?"}])
    assert text
    for name, arguments in calls:
        assert name in tools.FUNCTIONS and set(arguments) == {"a", "b"}
    assert isinstance(tools.ask(demo, "What is 17 times 23?"), str)


def test_the_loop_of_tools_runs_calls_and_returns_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([("call", [("multiply", {"a": 17, "b": 23})]), ("It is 391.", [])])
    seen: list[dict[str, str]] = []

    def scripted(runtime: object, messages: list[dict[str, str]]) -> Any:
        seen[:] = messages
        return next(turns)

    monkeypatch.setattr(tools, "next_turn", scripted)
    assert tools.ask(None, "What is 17 times 23?") == "It is 391."  # type: ignore[arg-type]
    assert seen[-1]["content"] == "The result of multiply is 391."


def test_extraction_gives_a_valid_object(demo: edgekit.Runtime) -> None:
    pytest.importorskip("llguidance")
    order = extract.extract(demo, "Order 1423: two kilos of coffee for Ada.")
    assert isinstance(order, extract.Order) and 1 <= order.amount <= 999


def test_scores(demo: edgekit.Runtime, demo_artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = score.classify(demo, "import numpy as", ["np", "pd", "plt"])
    assert max(shares, key=lambda label: shares[label]) == "np"
    assert math.isclose(sum(shares.values()), 1.0)
    assert score.perplexity(demo, "def add(a, b): return a + b") < score.perplexity(demo, "purple if lambda ] 7 the")
    score.main(str(demo_artifact))
    assert "np" in capsys.readouterr().out


class Client:
    """One request to an ASGI application; it leaves after `leave_after` pieces."""

    def __init__(self, body: bytes, leave_after: int | None = None) -> None:
        self._body, self._leave_after = body, leave_after
        self._left = asyncio.Event()
        self._asked = False
        self.status = 0
        self.text = b""
        self.pieces = 0

    async def receive(self) -> web_handler.Event:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, event: web_handler.Event) -> None:
        self.status = event.get("status", self.status)
        body = event.get("body", b"")
        self.text += body
        self.pieces += bool(body)
        if self._leave_after is not None and self.pieces >= self._leave_after:
            self._left.set()

    async def ask(self, app: web_handler.ChatApp, path: str = "/chat") -> Client:
        await app({"type": "http", "method": "POST", "path": path}, self.receive, self.send)
        return self

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line.removeprefix("data: ")) for line in self.text.decode().split("\n\n") if line]


def question(**options: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Write a function."}], **options}).encode()


def test_web_handler(demo_artifact: Path) -> None:
    async def serve() -> None:
        app = web_handler.ChatApp(str(demo_artifact))
        lifespan: asyncio.Queue[web_handler.Event] = asyncio.Queue()
        sent: asyncio.Queue[web_handler.Event] = asyncio.Queue()
        server = asyncio.create_task(app({"type": "lifespan"}, lifespan.get, sent.put))
        await lifespan.put({"type": "lifespan.startup"})
        assert (await sent.get())["type"] == "lifespan.startup.complete"
        assert app.runtime is not None

        whole = await Client(question(max_tokens=12)).ask(app)
        assert whole.status == 200
        assert whole.events()[-1]["finish_reason"] in ("length", "stop")

        leaver = await asyncio.wait_for(Client(question(max_tokens=900), leave_after=3).ask(app), 30)
        assert 3 <= leaver.pieces < 400
        for _ in range(100):
            metrics = app.runtime.runtime.metrics()
            if metrics.running == 0:
                break
            await asyncio.sleep(0.02)
        assert metrics.running == 0 and metrics.waiting == 0

        assert (await Client(b"[]").ask(app)).status == 400
        refused = await Client(question(adapter="x")).ask(app)
        assert refused.status == 400 and b"adapter" in refused.text
        assert (await Client(question(top_p=7)).ask(app)).status == 400
        assert (await Client(question(), 1).ask(app, "/")).status == 404

        await lifespan.put({"type": "lifespan.shutdown"})
        assert (await sent.get())["type"] == "lifespan.shutdown.complete"
        await server

    asyncio.run(serve())
