"""The public API: open an artifact, generate, stream and chat, also from asyncio."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_artifacts import install, make_artifact
from runtimes import codec, make_runtime

import edgekit
from edgekit import OpenOptions
from edgekit.errors import ContextExceeded, EdgekitError, InvalidInput, TargetMissing, UnknownName, Unsupported
from edgekit.testing import FakeEngine, FakeTarget, check_target

CHAT = [{"role": "user", "content": "the cat"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.fixture
def runtime() -> Iterator[edgekit.Runtime]:
    with make_runtime() as opened:
        yield opened


def test_an_artifact_opens_and_answers(artifact: Path) -> None:
    with edgekit.open(artifact) as runtime:
        answer = runtime.generate("the cat", max_tokens=12)
        assert len(answer.tokens) <= 12 and answer.text
        assert "".join(piece.text for piece in runtime.stream("the cat", max_tokens=12)) == answer.text
        tokens = runtime.encode("the cat")
        assert runtime.complete(tokens, max_tokens=12).text == answer.text
        assert runtime.decode(tokens) == "the cat"
        assert runtime.artifact is not None and runtime.artifact.folder == artifact
    assert isinstance(runtime.engine, FakeEngine) and runtime.engine.closed


def test_a_chat_is_the_rendered_prompt_completed(artifact: Path) -> None:
    with edgekit.open(artifact, warm_template=True) as runtime:
        text = runtime.render(CHAT)
        assert text == "<s>[user] the cat\n[assistant] "
        answer = runtime.chat(CHAT, max_tokens=9, temperature=1.0, seed=2)
        plain = runtime.complete(runtime.encode(text, add_special_tokens=False), max_tokens=9, temperature=1.0, seed=2)
        assert answer.tokens == plain.tokens
        assert answer.content == answer.text and answer.tool_calls == ()
        assert [piece.text for piece in runtime.stream(CHAT, max_tokens=9)][-1:] != []


OPENINGS: dict[str, tuple[dict[str, Any], type[EdgekitError], str]] = {
    "context too large": ({"context": 513}, InvalidInput, "context: 513 tokens exceed the capacity of 512"),
    "context of one": ({"context": 1}, InvalidInput, "context"),
    "context that is no number": ({"context": "8"}, InvalidInput, "context"),
    "context and window": ({"context": 100, "window": 100}, InvalidInput, "exclude each other"),
    "window too large": ({"window": 600}, InvalidInput, "window: 600"),
    "window too small": ({"window": 4, "sinks": 4}, InvalidInput, "window"),
    "sinks alone": ({"sinks": 4}, InvalidInput, "sinks belong to a window"),
    "another target": ({"target": "mlx"}, InvalidInput, "target mlx: .* is an artifact for fake; leave it out"),
    "negative sinks": ({"window": 64, "sinks": -1}, InvalidInput, "sinks"),
}


@pytest.mark.parametrize(("options", "kind", "message"), OPENINGS.values(), ids=OPENINGS)
def test_invalid_open_options_are_refused_by_name(artifact: Path, options, kind, message: str) -> None:
    with pytest.raises(kind, match=message):
        edgekit.open(artifact, **options)


def test_options_are_given_as_one_object_or_by_keyword(artifact: Path) -> None:
    given = {"window": 24, "sinks": 2, "memory": "1GiB"}
    with edgekit.open(artifact, OpenOptions(**given)) as one, edgekit.open(artifact, **given) as other:
        assert one.policy == other.policy and one.policy.window == 24
        assert one.memory().allowed_bytes == other.memory().allowed_bytes == 1 << 30
    with pytest.raises(InvalidInput, match="window: give OpenOptions or keywords, not both"):
        edgekit.open(artifact, OpenOptions(), window=24)
    with pytest.raises(InvalidInput, match="unknown option 'windw'; did you mean window"):
        edgekit.open(artifact, windw=24)
    assert all(field.description for field in OpenOptions.model_fields.values())


def test_a_smaller_context_and_a_window_are_kept(artifact: Path) -> None:
    with edgekit.open(artifact, context=20) as runtime, pytest.raises(ContextExceeded):
        runtime.complete([5] * 20)
    with edgekit.open(artifact, window=24, sinks=2) as runtime:
        assert len(runtime.complete([5] * 100, max_tokens=60, ignore_eos=True).tokens) == 60
        assert runtime.metrics().evictions > 0


def test_a_planned_window_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch)
    folder = make_artifact(tmp_path / "windowed", window=32)
    with edgekit.open(folder) as runtime:
        assert runtime.policy.window == 32
        assert len(runtime.complete([5] * 90, max_tokens=50, ignore_eos=True).tokens) == 50


class Absent(FakeTarget):
    def missing(self) -> str | None:
        return "nothing is installed; pip install everything"


class Inexact(FakeTarget):
    def open(self, plan, files, *, exact=False):
        return FakeEngine(vocabulary=plan.model.vocab_size, exact="never")


@pytest.mark.parametrize(
    ("target", "options", "kind", "message"),
    [
        (Absent, {}, TargetMissing, "fake: nothing is installed"),
        (Inexact, {"exact": True}, Unsupported, "exact: fake cannot give exact answers"),
    ],
)
def test_missing_packages_of_a_target_are_named(
    artifact: Path, monkeypatch, target, options, kind, message: str
) -> None:
    monkeypatch.setattr("edgekit.plugins.load_target", lambda name: target())
    with pytest.raises(kind, match=message):
        edgekit.open(artifact, **options)


def test_an_unknown_target_lists_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    folder = make_artifact(tmp_path / "artifact")
    with pytest.raises(UnknownName, match="known: executorch, llamacpp, mlx, onnx"):
        edgekit.open(folder)


def test_chat_options_belong_to_a_chat(runtime: edgekit.Runtime) -> None:
    with pytest.raises(InvalidInput, match="tools: belongs to a chat"):
        runtime.submit("the cat", tools=[TOOL])
    with pytest.raises(InvalidInput, match="template_options: belongs to a chat"):
        runtime.submit([1, 2], template_options={"enable_thinking": False})


def test_asyncio_gives_the_same_answers_side_by_side(runtime: edgekit.Runtime) -> None:
    asked = [{"max_tokens": 20, "temperature": 1.0, "seed": seed} for seed in range(6)]
    alone = [runtime.generate("the cat", **options).text for options in asked]
    chat = runtime.chat(CHAT, max_tokens=5).text

    async def main() -> None:
        async with edgekit.AsyncRuntime(make_runtime()) as together:
            answers = await asyncio.gather(*(together.generate("the cat", **options) for options in asked))
            assert [answer.text for answer in answers] == alone
            assert (await together.chat(CHAT, max_tokens=5)).text == chat
            pieces = [piece async for piece in together.stream("the cat", **asked[0])]
            assert "".join(piece.text for piece in pieces) == alone[0]
            assert pieces[-1].finish_reason == "length"
            assert (await together.complete([5, 6], max_tokens=3)).finish_reason == "length"

    asyncio.run(main())


def test_asyncio_errors_reach_their_caller() -> None:
    async def main() -> None:
        engine = FakeEngine(vocabulary=codec().vocabulary)
        async with edgekit.AsyncRuntime(make_runtime(engine)) as runtime:
            engine.failures = {3}
            with pytest.raises(EdgekitError, match="told to fail"):
                await runtime.generate("the cat", max_tokens=9)
            assert len((await runtime.generate("the cat", max_tokens=9)).tokens) == 9

    asyncio.run(main())


def test_asyncio_each_step_wakes_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop, woken = asyncio.get_running_loop(), list[str]()
        wake = loop.call_soon_threadsafe

        def counted(*arguments: Any, **options: Any) -> asyncio.Handle:
            woken.append(threading.current_thread().name)
            return wake(*arguments, **options)

        inner, all_submitted = make_runtime(), threading.Event()
        step = inner.step
        # The fake engine could end all answers before the last is submitted, so no step runs until then.
        monkeypatch.setattr(inner, "step", lambda: all_submitted.wait(60) and step())
        async with edgekit.AsyncRuntime(inner) as runtime:
            streams = [await runtime.submit("the cat", max_tokens=20, seed=seed) for seed in range(4)]
            monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
            all_submitted.set()
            await asyncio.gather(*(stream.answer() for stream in streams))
            assert 0 < woken.count("edgekit") <= runtime.metrics().steps

    asyncio.run(main())


def test_asyncio_the_next_step_waits_for_the_reader_of_a_first_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.runtime.async_runtime._FIRST_PIECE_S", 60)
    inner, steps = make_runtime(), list[int]()
    step = inner.step
    monkeypatch.setattr(inner, "step", lambda: (steps.append(1), step()))

    async def main() -> None:
        async with edgekit.AsyncRuntime(inner) as runtime, await runtime.submit("the cat", max_tokens=20) as stream:
            assert (await anext(stream)).tokens
            until_first = len(steps)
            await asyncio.sleep(0.05)  # other tasks of the loop run, and the piece is not passed on
            assert len(steps) == until_first
            assert [piece async for piece in stream][-1].finish_reason == "length"
            assert len(steps) > until_first

    asyncio.run(main())


@pytest.mark.parametrize("how", ["break", "cancel", "close"])
def test_asyncio_leaving_early_releases_everything(how: str) -> None:
    async def main() -> None:
        inner = make_runtime(window=64)
        runtime = edgekit.AsyncRuntime(inner)

        async def read() -> None:
            pieces = runtime.stream("the cat", max_tokens=1_000_000)
            async for _ in pieces:
                if how == "break":
                    break
            await pieces.aclose()

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        if how == "cancel":
            task.cancel()
        if how == "close":
            await runtime.close()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(200):
            if inner.engine.states == []:
                break
            await asyncio.sleep(0.01)
        assert inner.engine.states == []
        await runtime.close()
        assert not any(thread.name == "edgekit" for thread in threading.enumerate())

    asyncio.run(main())


def test_running_an_artifact_loads_no_training_library(artifact: Path, tmp_path: Path) -> None:
    code = (
        "import sys, edgekit\n"
        f"with edgekit.open({str(artifact)!r}) as runtime: runtime.generate('the cat', max_tokens=3)\n"
        "print(sorted({'torch', 'transformers', 'onnxruntime', 'mlx', 'optimum', 'llguidance'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_fake_target_passes_the_suite_of_targets() -> None:
    from edgekit.device.catalogue import all_profiles

    devices = list(all_profiles().values())[:3]
    listed = [device.model_copy(update={"targets": {**device.targets, "fake": ("cpu",)}}) for device in devices]
    check_target(FakeTarget(), listed)
    with pytest.raises(AssertionError, match="offers nothing"):
        check_target(FakeTarget(), devices)


class Boastful(FakeTarget):
    def offers(self, model, device):
        for offer in super().offers(model, device):
            yield offer.model_copy(update={"backend": "gpu"})


class Silent(FakeTarget):
    def missing(self):
        return " "


class Fickle(FakeTarget):
    asked = 0

    def offers(self, model, device):
        self.asked += 1
        return list(super().offers(model, device))[: self.asked]


@pytest.mark.parametrize("target", [Boastful(), Silent(), Fickle()], ids=lambda target: type(target).__name__)
def test_target_suite_detects_a_broken_contract(target: FakeTarget) -> None:
    from edgekit.device.catalogue import all_profiles

    device = next(iter(all_profiles().values()))
    with pytest.raises(AssertionError):
        check_target(target, [device.model_copy(update={"targets": {"fake": ("cpu",)}})])
