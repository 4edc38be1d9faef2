"""Tests a fake phone through the real `adb` client and server, with a small implementation of adb's protocol."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_adb import Phone
from lab_phones import ABI, answering, device_of, program
from tiny_adbd import Adbd

from edgekit.apps.bench.workload import read_workload
from edgekit.apps.lab.adb import AdbDevice
from edgekit.apps.lab.runner_job import job_of
from edgekit.artifact.artifact import Artifact
from edgekit.errors import DeviceUnreachable, WorkloadFailed

ADB = shutil.which("adb")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(ADB is None, reason="needs the real client: apt install adb")]
Plug = Callable[..., AdbDevice]


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return program(tmp_path / "phone.edgekit")


@pytest.fixture
def phone(tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> Phone:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    found = Phone(tmp_path / "phone")
    found.tell(abi=ABI)
    answering(found, job_of(artifact.folder, read_workload("quick"), loads=1))
    return found


@pytest.fixture
def plug(tmp_path: Path, phone: Phone, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plug]:
    """Connect the phone to a private adb server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("HOME", str(tmp_path))
    plugged: list[Adbd] = []

    def begin(**known: Any) -> AdbDevice:
        plugged.append(Adbd(phone, **known))
        address = f"127.0.0.1:{plugged[-1].port}"
        done = subprocess.run([str(ADB), "connect", address], capture_output=True, text=True, timeout=60)
        assert f"connected to {address}" in done.stdout, done.stdout + done.stderr
        return device_of(phone, address=address, options={"adb": str(ADB)})

    yield begin
    subprocess.run([str(ADB), "kill-server"], capture_output=True, timeout=60)
    for each in plugged:
        each.close()


@pytest.mark.parametrize("features", ["shell_v2,cmd", "cmd"], ids=["exit codes", "an old phone"])
def test_a_measurement_is_returned_through_the_real_client(plug: Plug, artifact: Artifact, features: str) -> None:
    device = plug(features=features)
    assert device.ping(timeout_s=30).startswith("Google Pixel 9, Android 16")
    with device.acquire(timeout_s=5):
        found = device.measure(artifact.folder, Path("quick"), timeout_s=60)
    assert found.status == "valid" and found.conditions.machine == "Google Pixel 9 (a processor)"


def test_runner_refusals_are_reported(plug: Plug, phone: Phone, artifact: Artifact) -> None:
    question = job_of(artifact.folder, read_workload("quick"), loads=1)
    answering(phone, question, "sys.exit('edgekit_runner: no such operator')")
    with pytest.raises(WorkloadFailed, match="no such operator"):
        plug().measure(artifact.folder, Path("quick"), timeout_s=60)


def test_an_unplugged_cable_is_a_lost_phone(plug: Plug, artifact: Artifact) -> None:
    device = plug(cut_at="timeout -k")
    with pytest.raises(DeviceUnreachable, match="adb lost"):
        device.measure(artifact.folder, Path("quick"), timeout_s=60)


def test_a_disconnected_phone_is_not_found(plug: Plug, phone: Phone, artifact: Artifact) -> None:
    device = device_of(phone, options={"adb": str(ADB)})
    with pytest.raises(DeviceUnreachable, match="not found"):
        device.ping(timeout_s=30)
    with pytest.raises(DeviceUnreachable, match="not found"):
        device.measure(artifact.folder, Path("quick"), timeout_s=30)
