"""Real ssh servers on the loopback, as several hosts; a stand-in for Python over there answers as it is told."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from lab_fakes import FakeDevice
from measured import fake

from edgekit.apps.bench.workload import bundled_workloads, read_workload
from edgekit.apps.lab.devices import DeviceSpec, connect
from edgekit.apps.lab.ssh import SshDevice

ADDRESS = "127.0.0.1"
SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else None)
needs_ssh = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None or sys.platform != "linux",
    reason="needs an ssh server and client: apt install openssh-server openssh-client",
)


class Host(NamedTuple):
    """One ssh server, with a home of its own."""

    port: int
    home: Path
    process: subprocess.Popen[bytes]
    options: dict[str, str | int]

    def spec(self, name: str, **options: str | int) -> DeviceSpec:
        return DeviceSpec(
            name=name,
            kind="ssh",
            profile="raspberry-pi-5-8gb",
            address=ADDRESS,
            environment={"EDGEKIT_HOME": str(self.home / "edgekit"), "TEMPLATE": str(self.home / "template.json")},
            options={**self.options, **options},
        )

    def device(self, name: str = "host", **options: str | int) -> SshDevice:
        device = connect(self.spec(name, **options))
        assert isinstance(device, SshDevice)
        return device


@contextmanager
def servers(tmp_path: Path) -> Iterator[Callable[[], Host]]:
    """Start ssh servers; a stand-in for Python there answers at once."""
    keys, started = tmp_path / "keys", list[Host]()
    keys.mkdir(mode=0o700)
    for name in ("client", "server"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    template = FakeDevice(DeviceSpec(name="x", kind="fake")).usual(fake(tmp_path / "any").folder, "quick")

    def begin() -> Host:
        while True:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = int(free.getsockname()[1])
            home = tmp_path / f"host-{port}"
            home.mkdir()
            (home / "template.json").write_text(template.model_dump_json())
            config = home / "sshd_config"
            config.write_text(
                f"Port {port}\nListenAddress {ADDRESS}\nHostKey {keys / 'server'}\n"
                f"AuthorizedKeysFile {keys / 'client.pub'}\n"
                f"PidFile {home / 'pid'}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
                "MaxStartups 100\nMaxSessions 100\nKexAlgorithms curve25519-sha256\n"  # the usual one takes 0.15 s
            )
            with (home / "log").open("wb") as log:
                process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(config)], stderr=log)
            if _answers(process, port):
                break
            if "Address already in use" not in (said := (home / "log").read_text()):  # somebody was faster
                raise AssertionError(f"sshd: {said}")
        with (keys / "known_hosts").open("a") as known:
            known.write(f"[{ADDRESS}]:{port} {(keys / 'server.pub').read_text()}")
        options: dict[str, str | int] = {
            "port": port,
            "identity": str(keys / "client"),
            "known_hosts": str(keys / "known_hosts"),
            "folder": str(home / "lab"),
            "python": answering(home, ""),
        }
        started.append(Host(port, home, process, options))
        return started[-1]

    try:
        yield begin
    finally:
        for host in started:
            host.process.kill()
            host.process.wait()


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether the server came up; it has as long as a busy machine may need."""
    ends = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < ends:
        with socket.socket() as attempt:
            if attempt.connect_ex((ADDRESS, port)) == 0:
                return True
        time.sleep(0.02)
    process.kill()
    process.wait()
    return False


def answering(home: Path, before: str, *, by_name: bool = False) -> str:
    """A program that does `before` and then says what was measured, in the words of the template.

    A workload that comes `by_name` is bundled; otherwise its file is named after its hash.
    """
    path = home / f"stand-in-{len(list(home.iterdir()))}"
    asked = 'found["workload_sha256"] = os.path.basename(sys.argv[6]).split(".")[0]'
    if by_name:
        known = {name: read_workload(name).sha256 for name in bundled_workloads()}
        asked = f'found["workload_sha256"] = {known!r}[sys.argv[6]]'
    path.write_text(
        f"#!{sys.executable} -S\nimport hashlib, json, os, signal, sys, time\n"
        'if "--version" in sys.argv: sys.exit(print("edgekit stand-in"))\n'
        f"{before}\n"
        'found = json.load(open(os.environ["TEMPLATE"]))\n'
        'manifest = open(sys.argv[4] + "/manifest.json", "rb").read()\n'
        'found["arm"]["artifact_sha256"] = hashlib.sha256(manifest).hexdigest()\n'
        f"{asked}\n"
        "print(json.dumps(found))\n"
    )
    path.chmod(0o755)
    return str(path)
