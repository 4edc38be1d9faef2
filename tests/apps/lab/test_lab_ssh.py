"""Machines behind real ssh servers on the loopback: transfers, measurements and faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from fake_artifacts import install
from lab_fakes import QUICK, begun, lab_of
from measured import fake
from ssh_hosts import Host, answering, needs_ssh, servers

from edgekit.apps.lab.devices import DeviceSpec, connect
from edgekit.apps.lab.run import run_lab
from edgekit.apps.lab.ssh import SshDevice
from edgekit.apps.lab.store import LabStore
from edgekit.artifact.artifact import open_artifact
from edgekit.errors import DeviceFailed, DeviceUnreachable, InvalidInput, WorkloadFailed

pytestmark = [pytest.mark.slow, needs_ssh]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Host]]:
    with servers(tmp_path) as begin:
        yield begin


def test_a_real_measurement_is_returned(
    start: Callable[[], Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch)
    artifact = fake(tmp_path / "one")
    spec = start().spec("host", python=sys.executable, repeats=1, loads=1)
    device = connect(
        spec.model_copy(update={"environment": {**spec.environment, "PYTHONPATH": str(tmp_path / "site")}})
    )
    assert device.ping(timeout_s=120).startswith("edgekit")
    found = device.measure(artifact.folder, Path("quick"), timeout_s=300)
    assert found.subject.artifact_sha256 == artifact.sha256 and found.status in ("valid", "contended", "throttled")


def test_a_machine_is_prepared_once_before_its_first_measurement(start: Callable[[], Host], tmp_path: Path) -> None:
    host, artifact = start(), fake(tmp_path / "one")
    log = host.home / "prepared"
    spec = host.spec("host", python=answering(host.home, ""))
    device = connect(spec.model_copy(update={"prepare": f"echo once >> {log}"}))
    assert device.ping(timeout_s=60).endswith("it is prepared before the first measurement")
    for _ in range(2):
        device.measure(artifact.folder, Path("quick"), timeout_s=60)
    assert log.read_text() == "once\n"
    failing = connect(spec.model_copy(update={"prepare": "echo no room >&2; exit 3"}))
    with pytest.raises(DeviceFailed, match="no room"):
        failing.measure(artifact.folder, Path("quick"), timeout_s=60)


def test_only_machines_with_a_shell_are_prepared() -> None:
    with pytest.raises(InvalidInput, match="kind local runs no command before it measures; leave `prepare` out"):
        connect(DeviceSpec(name="here", kind="local", prepare="true"))


def test_an_artifact_is_sent_once_and_partial_files_are_continued(start: Callable[[], Host], tmp_path: Path) -> None:
    host = start()
    artifact = fake(tmp_path / "one")
    tokenizer = artifact.folder / "tokenizer.json"
    place = host.home / "lab" / artifact.sha256
    place.mkdir(parents=True)
    half = tokenizer.read_bytes()[:1000]
    (place / "tokenizer.json.part").write_bytes(half)
    device = host.device()
    sent: list[int] = []
    ask = device._ask

    def counting(command: str, timeout_s: float, given: bytes = b"", may_exit: tuple[int, ...] = (0,)) -> bytes:
        sent.append(len(given))
        return ask(command, timeout_s, given, may_exit)

    device._ask = counting  # type: ignore[method-assign]
    device.measure(artifact.folder, Path("quick"), timeout_s=120)
    assert open_artifact(place).sha256 == artifact.sha256
    assert tokenizer.stat().st_size - 1000 in sent and tokenizer.stat().st_size not in sent
    assert [path.name for path in place.iterdir() if path.name.endswith(".part")] == []
    before = sum(sent)
    sent.clear()
    device.measure(artifact.folder, Path("quick"), timeout_s=120)
    assert sum(sent) < 2000 < before


def test_a_partial_file_of_another_content_is_removed(start: Callable[[], Host], tmp_path: Path) -> None:
    host = start()
    artifact = fake(tmp_path / "one")
    place = host.home / "lab" / artifact.sha256
    place.mkdir(parents=True)
    (place / "tokenizer.json.part").write_bytes(b"x" * 500)
    device = host.device()
    with pytest.raises(DeviceUnreachable, match="arrived damaged"):
        device.measure(artifact.folder, Path("quick"), timeout_s=120)
    device.measure(artifact.folder, Path("quick"), timeout_s=120)


@pytest.mark.parametrize(
    ("before", "error", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", DeviceUnreachable, "lost"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", DeviceUnreachable, "lost"),
        ("time.sleep(600)", DeviceUnreachable, "lost"),
        ("sys.exit('edgekit: no such thing')", WorkloadFailed, "no such thing"),
        ("sys.exit(print('{}'))", WorkloadFailed, "no measurement"),
    ],
    ids=["killed", "stopped", "slow", "refused", "wrong output"],
)
def test_remote_failures_are_reported(
    start: Callable[[], Host], tmp_path: Path, before: str, error: type[Exception], said: str
) -> None:
    host = start()
    device = host.device(python=answering(host.home, before))
    ask = device._ask

    def patient(command: str, timeout_s: float, given: bytes = b"", may_exit: tuple[int, ...] = (0,)) -> bytes:
        return ask(command, 300.0, given, may_exit)  # what ends it is the limit over there

    device._ask = patient  # type: ignore[method-assign]
    with pytest.raises(error, match=said):
        device.measure(fake(tmp_path / "one").folder, Path("quick"), timeout_s=1.0 if said == "lost" else 300.0)


def test_a_cut_connection_is_retried(start: Callable[[], Host], tmp_path: Path) -> None:
    host = start()
    # The first time, whoever serves the connection over there is killed: the group that this program belongs to.
    cut = host.home / "cut"
    cutting = f"if not os.path.exists({str(cut)!r}): open({str(cut)!r}, 'w').close(); os.killpg(0, signal.SIGKILL)"
    lab = lab_of(tmp_path, 1)
    spec = host.spec("host", python=answering(host.home, cutting))
    lab = lab.model_copy(update={"devices": (spec,)})
    with LabStore(tmp_path / "lab.sqlite") as store:
        run = begun(store, lab)
        run_lab(lab, store, run, {"host": connect(spec)}, clock=QUICK)
        assert store.info(run).states == {"done": 4}
        assert [attempt.outcome for attempt in store.attempts(run)].count("infra_lost") == 1


def test_a_server_that_is_gone_is_unreachable(start: Callable[[], Host]) -> None:
    host = start()
    device = host.device()
    assert device.ping(timeout_s=120) == "edgekit stand-in"
    host.process.send_signal(signal.SIGTERM)
    host.process.wait()
    with pytest.raises(DeviceUnreachable, match="refused"):
        device.ping(timeout_s=120)


def test_a_host_with_another_key_is_refused(start: Callable[[], Host], tmp_path: Path) -> None:
    host = start()
    known = tmp_path / "others"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    for line in (f"[127.0.0.1]:{host.port} {(tmp_path / 'other.pub').read_text()}", ""):
        known.write_text(line)
        with pytest.raises(DeviceUnreachable, match=r"[Hh]ost key"):
            host.device(known_hosts=str(known)).ping(timeout_s=120)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root mounts a small disk")
def test_a_full_remote_disk_is_reported(start: Callable[[], Host], tmp_path: Path) -> None:
    host = start()
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        with pytest.raises(DeviceFailed, match=r"disk is full.*No space left"):
            host.device(folder=str(small / "lab")).measure(fake(tmp_path / "one").folder, Path("quick"), timeout_s=120)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize(
    "known",
    [
        {"address": None},
        {"address": "host;reboot"},
        {"options": {"user": "-oProxyCommand=x"}},
        {"options": {"user": "a b"}},
        {"options": {"folder": "$(reboot)"}},
        {"options": {"folder": "../.."}},
        {"options": {"port": "22"}},
        {"options": {"prot": 22}},
    ],
    ids=str,
)
def test_names_that_could_be_commands_are_refused(known: dict[str, object]) -> None:
    spec = {"name": "host", "kind": "ssh", "profile": "raspberry-pi-5-8gb", "address": "host", **known}
    with pytest.raises(InvalidInput):
        SshDevice(DeviceSpec(**spec))  # type: ignore[arg-type]


def test_stop_ends_a_waiting_call(start: Callable[[], Host], tmp_path: Path) -> None:
    host = start()
    begun_there = tmp_path / "begun"
    device = host.device(python=answering(host.home, f"open({str(begun_there)!r}, 'w').close(); time.sleep(600)"))

    def stop() -> None:
        while not begun_there.exists():
            time.sleep(0.02)
        device.stop()

    stopping = Thread(target=stop, daemon=True)
    stopping.start()
    with pytest.raises(DeviceUnreachable, match="lost"):
        device.measure(fake(tmp_path / "one").folder, Path("quick"), timeout_s=300)
    stopping.join()
