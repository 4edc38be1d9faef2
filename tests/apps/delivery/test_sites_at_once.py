"""Sites and commands that are used at once: nothing is lost, and a killed process blocks nobody."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple

import click
import fake_artifacts
import gguf_files
import published
import pytest
import tiny_models
from fake_artifacts import make_artifact

import edgekit
from edgekit import OpenOptions
from edgekit.apps.delivery import publish, pull, withdraw
from edgekit.apps.delivery.publish import read_site
from edgekit.artifact.artifact import verify
from edgekit.cli import _artifact_for, _export_here, main
from edgekit.contracts.neutral import NeutralWeights
from edgekit.errors import InvalidInput, UnknownName

Change = Callable[[Callable[[float, float, str], None]], object]
LONGEST_S = 300.0  # of a command
_PROMPTS = [{"id": number, "prompt": f"the cat {number}"} for number in range(6)]


def _publish(site: Path, artifact: Path, release: str) -> Change:
    return lambda progress: publish([artifact], site, release=release, progress=progress)


def _at_once(first: Change, second: Change) -> list[str]:
    """Start `second` while `first` is copying; return what `second` waited for."""
    copying, waits_or_done = threading.Event(), threading.Event()
    waited: list[str] = []

    def pause(done: float, total: float, what: str) -> None:
        copying.set()
        assert waits_or_done.wait(60)

    def notice(done: float, total: float, what: str) -> None:
        if what.startswith("waiting"):
            waited.append(what)
            waits_or_done.set()

    def run_second() -> None:
        try:
            second(notice)
        finally:
            waits_or_done.set()

    threads = [threading.Thread(target=first, args=(pause,)), threading.Thread(target=run_second)]
    threads[0].start()
    assert copying.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return waited


def test_two_publishes_at_once_keep_both_releases(tmp_path: Path) -> None:
    site, artifact = tmp_path / "site", make_artifact(tmp_path / "artifact")
    waited = _at_once(_publish(site, artifact, "1"), _publish(site, artifact, "2"))
    index = read_site(site)
    assert (index.sequence, index.releases) == (2, 2)
    assert [(each.name, each.number) for each in index.channel("stable")] == [("1", 1), ("2", 2)]
    assert waited == [f"waiting for process {os.getpid()}, which changes {site}"]
    assert sorted(path.name for path in site.iterdir()) == ["files", "index.json"]


def _publish_without_end(site: Path, artifact: Path, begun: Path) -> None:
    def pause(done: float, total: float, what: str) -> None:
        begun.touch()
        time.sleep(600)

    publish([artifact], site, release="1", progress=pause)


def test_a_killed_publish_blocks_nobody(tmp_path: Path) -> None:
    site, artifact, begun = tmp_path / "site", make_artifact(tmp_path / "artifact"), tmp_path / "begun"
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_publish_without_end, args=(site, artifact, begun), daemon=True)
    process.start()
    while not begun.exists():
        time.sleep(0.01)

    def kill(done: float, total: float, what: str) -> None:
        if what.startswith("waiting"):
            assert process.pid is not None and f"process {process.pid}," in what
            os.kill(process.pid, signal.SIGKILL)
            process.join(60)

    assert publish([artifact], site, release="2", progress=kill).sequence == 1
    assert process.exitcode == -signal.SIGKILL
    assert not (site / ".lock").exists()


def test_a_wrong_name_leaves_no_site_behind(tmp_path: Path) -> None:
    site = tmp_path / "site"
    with pytest.raises(UnknownName, match="unknown channel 'stable'"):
        withdraw(site, release="1")
    with pytest.raises(UnknownName, match="unknown release '1'"):
        publish([], site, release="1", rollout=0.5)
    with pytest.raises(InvalidInput):
        publish([tmp_path / "none"], site, release="1")
    assert not site.exists()


class Ending(NamedTuple):
    """The exit code of a command and its last line."""

    code: int
    said: str


class Command(NamedTuple):
    """`run` gets a folder and a name that no other process has; `refusal` is the only line with which it may refuse.

    Each runs in a separate process, forked from this one, and both begin at the same moment.
    """

    run: Callable[[Path, str], None]
    refusal: str = "$^"


class Pairs:
    """The commands over small files in `shared`, which they only read."""

    def __init__(self, shared: Path, patch: pytest.MonkeyPatch) -> None:
        self.shared, self.patch = shared, patch
        fake_artifacts.install(shared / "target", patch)
        self.device = published.device_profile(shared)
        self.releases = [published.make_artifact(shared / f"release-{number}", (0, 5)[:number]) for number in (0, 1)]
        self.artifact = make_artifact(shared / "artifact")
        self.model = tiny_models.write_tiny(shared / "model", layers=1)
        self.gguf = shared / "tiny.gguf"
        gguf_files.write_family(self.gguf, "llama")
        (shared / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in _PROMPTS))
        before = shared / "before"
        for number in (0, 1):
            publish([self.releases[number].folder], before / "site", release=f"{number}")
            pull((before / "site").as_uri(), before / "app", device=self.device, allow=("file",))
        patch.setattr(_export_here, "export_here", self._export_fake)
        taken = " is writing it now| exists already|another process writes it now"
        self.commands = {
            "publish": Command(self._publish),
            "withdraw": Command(lambda folder, name: main([*self._site(folder), "--release", "1", "--withdraw"])),
            "pull": Command(self._pull),
            "rollback": Command(lambda folder, name: main(["rollback", str(folder / "app")])),
            "quantise": Command(self._quantise, taken),
            "export": Command(self._export, taken),
            "batch": Command(self._batch, taken),
            "run": Command(self._run),
            "serve": Command(self._serve),
            "prune": Command(self._prune),
        }

    def run(self, first: str, second: str) -> None:
        """Run two commands at once in a fresh folder. Raises AssertionError with what they said."""
        with tempfile.TemporaryDirectory(dir=self.shared, prefix="pair-") as name:
            folder = Path(name) / "files"
            shutil.copytree(self.shared / "before", folder)
            self.patch.setenv("EDGEKIT_HOME", str(folder / "home"))
            endings = _endings(folder, [self.commands[first].run, self.commands[second].run])
            told = f"{first} and {second}: {endings}"
            for command, ending in zip((first, second), endings, strict=True):
                refused = ending.code == 2 and re.search(self.commands[command].refusal, ending.said)
                assert ending.code == 0 or refused, told
            assert Ending(0, "") in [ending._replace(said="") for ending in endings], told
            try:
                self._check(folder, [first, second], endings)
            except Exception as error:
                raise AssertionError(f"{told}: {error!r}") from error

    def _check(self, folder: Path, commands: list[str], endings: list[Ending]) -> None:
        index = read_site(folder / "site")
        releases = {each.name: each for each in index.channel("stable")}
        new = {f"new-{place}" for place, command in enumerate(commands) if command == "publish"}
        assert set(releases) == {"0", "1"} | new, "a release is lost"
        assert sorted(each.number for each in releases.values()) == list(range(1, len(releases) + 1))
        assert index.sequence == 2 + sum(command in ("publish", "withdraw") for command in commands)
        assert releases["1"].withdrawn == ("withdraw" in commands)
        if new:
            pull((folder / "site").as_uri(), folder / "check", device=self.device, allow=("file",))
        verify(folder / "app")
        if "quantise" in commands:
            NeutralWeights.open(folder / "weights", verify=True)
        if "export" in commands:
            verify(folder / "out.edgekit")
        if "batch" in commands:
            lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
            assert sorted(line["id"] for line in lines) == [each["id"] for each in _PROMPTS]
        if "run" in commands:
            with edgekit.open(self.artifact, prefixes="1MiB") as runtime:
                assert runtime.load_prefixes(folder / "kept") > 0
        left = [path for path in folder.rglob("*") if re.search(r"\.(?:lock|part|gone)$", path.name)]
        assert not left, f"files are left: {left}"

    def _site(self, folder: Path) -> list[str]:
        return ["publish", "-o", str(folder / "site")]

    def _publish(self, folder: Path, name: str) -> None:
        main([*self._site(folder), str(self.releases[0].folder), "--release", f"new-{name}"])

    def _pull(self, folder: Path, name: str) -> None:
        site = (folder / "site").as_uri()
        main(["pull", site, "-o", str(folder / "app"), "--device", self.device, "--allow", "file"])

    def _quantise(self, folder: Path, name: str) -> None:
        options = ["--recipe", "s4-g32", "--effort", "quick", "-o", str(folder / "weights")]
        main(["quantize", str(self.model), *options])

    def _export(self, folder: Path, name: str) -> None:
        options = ["--device", "this", "--target", "onnx", "--recipe", "s4-g32", "--effort", "quick", "--context", "64"]
        main(["export", str(self.model), *options, "-o", str(folder / "out.edgekit")])

    def _batch(self, folder: Path, name: str) -> None:
        prompts = ["--batch", str(self.shared / "prompts.jsonl"), "-o", str(folder / "answers.jsonl")]
        main(["run", str(self.artifact), *prompts, "--max-tokens", "4"])

    def _run(self, folder: Path, name: str) -> None:
        main(["run", str(self.artifact), f"the cat {name}", "--max-tokens", "4", "--prefixes", str(folder / "kept")])

    def _serve(self, folder: Path, name: str) -> None:
        """Open the artifact of a GGUF file several times. For onnx: llama.cpp's OpenMP hangs in a forked process."""
        with click.Context(click.Command("serve")):
            artifact = _artifact_for.artifact_for(str(self.gguf), OpenOptions(target="onnx"))
            for _ in range(5):
                with edgekit.open(artifact) as runtime:
                    assert runtime.generate("the", max_tokens=2).tokens

    def _prune(self, folder: Path, name: str) -> None:
        """Prune again and again, so that the other command is met at many moments."""
        for _ in range(50):
            with pytest.raises(SystemExit) as ended:
                main(["store", "prune", "--all"])
            if ended.value.code:
                raise ended.value

    def _export_fake(self, source: object, context: object, target: object, out: Path, store: Path) -> None:
        shutil.copytree(self.artifact, out)


def _endings(folder: Path, works: list[Callable[[Path, str], None]]) -> list[Ending]:
    context = multiprocessing.get_context("fork")
    begin = context.Event()
    logs = [folder.parent / f"log-{place}" for place in range(len(works))]
    processes = [
        context.Process(target=_work, args=(work, folder, str(place), begin, log), daemon=True)
        for place, (work, log) in enumerate(zip(works, logs, strict=True))
    ]
    for process in processes:
        process.start()
    begin.set()
    for process in processes:
        process.join(LONGEST_S)
        assert process.exitcode is not None, f"a command takes more than {LONGEST_S:.0f} s"
    return [
        Ending(process.exitcode or 0, (log.read_text().strip().splitlines() or [""])[-1])
        for process, log in zip(processes, logs, strict=True)
    ]


def _work(work: Callable[[Path, str], None], folder: Path, name: str, begin: Any, log: Path) -> None:
    with log.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        sys.stdout = sys.stderr = file
        begin.wait()
        work(folder, name)


def pairs() -> list[tuple[str, str]]:
    """Return every pair that shares a site, an installation, an output or the cache."""
    groups = ("publish withdraw pull", "pull rollback", "quantise export serve prune", "batch prune", "run")
    shared = [combinations_with_replacement(group.split(), 2) for group in groups]
    return sorted({pair for group in shared for pair in group})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> object:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        yield Pairs(tmp_path_factory.mktemp("pairs"), patch)


@pytest.mark.onnx
@pytest.mark.quantize
@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize(("first", "second"), pairs())
def test_two_commands_at_once_lose_nothing(made: Pairs, first: str, second: str, times: int) -> None:
    for _ in range(times):
        made.run(first, second)
