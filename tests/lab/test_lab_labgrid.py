"""Places of a real labgrid coordinator and exporter: reservation, measurement and release."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from getpass import getuser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
from lab_fakes import QUICK, begun, lab_of
from ssh_hosts import Host, answering, needs_ssh, servers

from edgekit.errors import DeviceFailed, DeviceTimeout, InvalidInput, WorkloadFailed
from edgekit.lab.devices import DeviceSpec, connect
from edgekit.lab.labgrid import LabgridDevice, read_place
from edgekit.lab.run import run_lab
from edgekit.lab.store import LabStore

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
CLIENT = shutil.which("labgrid-client", path=PATH)
COORDINATOR = shutil.which("labgrid-coordinator", path=PATH)
real = [
    pytest.mark.slow,
    needs_ssh,
    pytest.mark.skipif(CLIENT is None or COORDINATOR is None, reason="needs labgrid: pip install 'edgekit[labgrid]'"),
]


class Grid(NamedTuple):
    """A coordinator and an exporter with one place: an ssh server with a power switch."""

    address: str
    host: Host
    switched: list[str]

    def client(self, *words: str) -> str:
        command = [str(CLIENT), "-x", self.address, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    def spec(self, name: str = "board", **options: Any) -> DeviceSpec:
        there = self.host.spec(name)
        kept = {key: value for key, value in there.options.items() if key != "port"}
        known = {"kind": "labgrid", "address": self.address, "options": {**kept, "client": str(CLIENT), **options}}
        return there.model_copy(update=known)

    def is_free(self) -> bool:
        return "acquired: None" in self.client("-p", "board-1", "show") and self.client("reservations") == ""


def a_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Grid]:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    switched: list[str] = []

    class Switch(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            switched.append(self.path.rsplit("/", 1)[-1])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    power = HTTPServer(("127.0.0.1", 0), Switch)
    Thread(target=power.serve_forever, daemon=True).start()
    folder, address = tmp_path / "grid", f"127.0.0.1:{a_port()}"
    folder.mkdir()
    running: list[subprocess.Popen[bytes]] = []

    def start(program: str, *words: str) -> None:
        with (folder / f"{program}.log").open("wb") as log:
            command = [str(shutil.which(program, path=PATH)), *words]
            running.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True))

    with servers(tmp_path) as begin:
        host = begin()
        (folder / "exported.yaml").write_text(
            f"bench:\n  NetworkService: {{address: 127.0.0.1, port: {host.port}, username: {getuser()}}}\n"
            "  NetworkPowerPort:\n    {model: simplerest, index: 0, "
            f"host: 'http://127.0.0.1:{power.server_port}/{{value}}'}}\n"
        )
        made = Grid(address, host, switched)
        try:
            start("labgrid-coordinator", "-l", address)
            until(lambda: made.client("places") == "")
            start("labgrid-exporter", "-c", address, "-n", "exporter", "exported.yaml")
            until(lambda: "NetworkService" in made.client("resources"))
            made.client("-p", "board-1", "create")
            made.client("-p", "board-1", "add-match", "exporter/bench/*")
            made.client("-p", "board-1", "set-tags", "board=orin")
            yield made
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait(20)
            power.shutdown()
            power.server_close()


def until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        with suppress(subprocess.CalledProcessError):
            if is_so():
                return
        time.sleep(0.2)
    raise AssertionError("it never became so")


class TestPlaces:
    """With labgrid itself."""

    pytestmark = real

    @pytest.mark.parametrize("wanted", [{"place": "board-1"}, {"tags": "board=orin"}], ids=str)
    def test_a_place_is_held_while_it_is_measured_and_given_back(
        self, grid: Grid, tmp_path: Path, wanted: dict[str, str]
    ) -> None:
        lab = lab_of(tmp_path, 1)
        device = connect(grid.spec(**wanted))
        assert "board" in device.ping(timeout_s=30)
        with device.acquire(timeout_s=60):
            shown = grid.client("-p", "board-1", "show")
            assert "acquired: " in shown and "/edgekit-" in shown
            found = device.measure(Path(lab.artifacts[0]), Path("quick"), timeout_s=30)
            assert found.status == "valid"
        assert grid.is_free() and grid.switched == []
        with pytest.raises(ZeroDivisionError), device.acquire(timeout_s=60):
            raise ZeroDivisionError
        assert grid.is_free()

    def test_a_busy_place_is_waited_for_until_the_timeout(self, grid: Grid) -> None:
        device = connect(grid.spec(place="board-1"))
        grid.client("-p", "board-1", "acquire")
        with pytest.raises(DeviceTimeout, match="took longer"), device.acquire(timeout_s=5):
            raise AssertionError("it is another's")
        Thread(target=lambda: (time.sleep(3), grid.client("-p", "board-1", "release")), daemon=True).start()
        with device.acquire(timeout_s=60):
            assert "/edgekit-" in grid.client("-p", "board-1", "show")

    def test_a_lab_that_is_killed_gives_its_place_back(self, grid: Grid, tmp_path: Path) -> None:
        code = (
            f"import sys, time; sys.path[:0] = {sys.path!r}\n"
            "from edgekit.lab.devices import DeviceSpec, connect\n"
            f"device = connect(DeviceSpec.model_validate_json({grid.spec(place='board-1').model_dump_json()!r}))\n"
            "with device.acquire(timeout_s=60):\n    print('held', flush=True)\n    time.sleep(600)\n"
        )
        lab = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert lab.stdout is not None and lab.stdout.readline() == b"held\n"
        assert "/edgekit-" in grid.client("-p", "board-1", "show")
        lab.send_signal(signal.SIGKILL)
        lab.communicate()
        until(grid.is_free, 30)

    def test_a_machine_that_was_lost_twice_is_switched_off_and_on(self, grid: Grid, tmp_path: Path) -> None:
        calls = grid.host.home / "calls"
        dying = (
            f"calls = open({str(calls)!r}, 'a+'); calls.write('x'); calls.flush(); calls.seek(0)\n"
            "if len(calls.read()) < 3: os.kill(os.getpid(), signal.SIGKILL)"
        )
        spec = grid.spec(place="board-1", python=answering(grid.host.home, dying))
        lab = lab_of(tmp_path, 1).model_copy(update={"devices": (spec,), "workloads": ("quick",)})
        with LabStore(tmp_path / "lab.sqlite") as store:
            run = begun(store, lab)
            info = run_lab(lab, store, run, {"board": connect(spec)}, clock=QUICK)
            assert info.states == {"done": 2}
            assert [one.outcome for one in store.attempts(run)].count("infra_lost") == 2
        assert grid.switched == ["0", "1"] and grid.is_free()

    def test_missing_labgrid_places_are_reported(self, grid: Grid) -> None:
        for options, said in (
            ({"place": "nowhere"}, "matches nothing"),
            ({"place": "board"}, "knows no place board; it has board-1"),
        ):
            with pytest.raises(DeviceFailed, match=said):
                connect(grid.spec(**options)).ping(timeout_s=30)
        grid.client("-p", "empty", "create")
        with pytest.raises(DeviceFailed, match="has no NetworkService"):
            connect(grid.spec(place="empty")).ping(timeout_s=30)
        broken = connect(grid.spec(place="board-1", python=answering(grid.host.home, "sys.exit('no')")))
        with pytest.raises(WorkloadFailed, match="exit code 1"), broken.acquire(timeout_s=60):
            broken.measure(Path(lab_of(grid.host.home, 1).artifacts[0]), Path("quick"), timeout_s=30)
        assert grid.is_free()


@pytest.mark.parametrize(
    "told",
    [
        "",
        "hello",
        "Place 'a':\nAcquired resource 'b' (c):\n  __import__('os').system('reboot')\n",
        "Place 'a':\nAcquired resource 'b' (c):\n  {'cls': 'NetworkService'}\n",
        "Place 'a':\nAcquired resource 'b' (c):\n  " + "[" * 5000,
        "Place 'a':\nMatching resource 'b' (c):\n  {'cls': 1, 'params': 2}\n",
    ],
    ids=["nothing", "words", "code", "half", "deep", "numbers"],
)
def test_labgrid_output_is_parsed_as_literals(told: str) -> None:
    with pytest.raises(DeviceFailed, match="labgrid-client show"):
        read_place(told)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"address": None}, "coordinator"),
        ({"address": "host;reboot"}, "coordinator"),
        ({"options": {"place": "-x"}}, "not a valid name of a place"),
        ({"options": {"tags": "board"}}, "write them as"),
        ({"options": {"tags": "board=a", "place": "b"}}, "not both"),
        ({"options": {"plaec": "b"}}, "plaec"),
        ({"options": {"boot_s": "soon"}}, "boot_s"),
        ({"options": {"client": "no-such-program"}}, "needs labgrid-client"),
    ],
    ids=str,
)
def test_a_spec_that_labgrid_could_misread_is_refused(known: dict[str, Any], said: str) -> None:
    options = {"client": sys.executable, **known.pop("options", {})}
    spec = {"name": "board", "kind": "labgrid", "profile": "pixel-9", "address": "host:20408", **known}
    with pytest.raises((InvalidInput, DeviceFailed), match=said):
        LabgridDevice(DeviceSpec(**spec, options=options))
