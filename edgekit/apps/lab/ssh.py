"""Machines reached through the system's ssh: the artifact is sent once, by content, and measured.

Host keys are always checked, ssh never asks for a password, and the machine's answers are untrusted.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edgekit import Artifact, load_profile, open_artifact
from edgekit.apps.bench import Measurement, read_workload
from edgekit.apps.lab.devices import DeviceSpec, read_measurement
from edgekit.apps.lab.programs import Programs, exit_error, lease
from edgekit.common.files import file_sha256, home
from edgekit.contracts.manifest import MANIFEST
from edgekit.errors import DeviceUnreachable, InvalidInput, quote_short

_OPTIONS = {"user": str, "port": int, "identity": str, "known_hosts": str, "python": str, "folder": str,
            "repeats": int, "loads": int}  # fmt: skip
# Exit codes of ssh for connection errors, and of a remote `timeout` or kill.
_LOST = (255, 124, 137)
_STEP_BYTES = 8 << 20
_PREPARE_S = 1800.0


class SshDevice:
    """Runs `edgekit bench` on another machine. The remote program ends with the connection."""

    can_prepare = True

    def __init__(self, spec: DeviceSpec, profiles: Sequence[Path] = ()) -> None:
        spec.check_options(_OPTIONS)
        if spec.address is None or not re.fullmatch(r"[A-Za-z0-9_\[][A-Za-z0-9_.:\]-]{0,253}", spec.address):
            raise InvalidInput(
                f"{spec.name}: address: give the name or number of a host, found {quote_short(spec.address)}"
            )
        user = str(spec.options.get("user", ""))
        if user and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", user):
            raise InvalidInput(f"{spec.name}: user {quote_short(user)}: is not a valid user name")
        folder = str(spec.options.get("folder", ".cache/edgekit-lab"))
        if not re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./-]{0,200}", folder) or ".." in folder:
            raise InvalidInput(f"{spec.name}: folder {quote_short(folder)}: give a plain path")
        self.name, self.spec, self.profile = spec.name, spec, load_profile(spec.profile, profiles)
        self.folder, self._user = folder, user
        self._python = shlex.quote(str(spec.options.get("python", "python3")))
        self._programs, self._is_prepared = Programs(spec.name), False
        self._owner = hashlib.sha256(f"{platform.node()} {home()}".encode()).hexdigest()[:16]

    def ping(self, *, timeout_s: float) -> str:
        if self.spec.prepare is not None and not self._is_prepared:
            system = self._ask("uname -sm", timeout_s).decode("utf-8", "replace").strip()
            return f"{system}; it is prepared before the first measurement"
        return self._ask(f"{self._python} -m edgekit --version", timeout_s).decode("utf-8", "replace").strip()

    @contextmanager
    def acquire(self, *, timeout_s: float) -> Iterator[None]:
        with lease(f"ssh {self._user}@{self.spec.address}:{self.spec.options.get('port', 22)}", self.name, timeout_s):
            yield

    def measure(self, artifact: Path, workload: Path, *, timeout_s: float) -> Measurement:
        sealed = open_artifact(artifact)
        environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.spec.environment.items())
        if self.spec.prepare is not None and not self._is_prepared:
            self._ask(f"{environment} sh -c {shlex.quote(self.spec.prepare)}", _PREPARE_S)
            self._is_prepared = True
        remote = self._push(sealed, timeout_s)
        work = read_workload(workload)
        workload_path = f"{self.folder}/{work.sha256}.yaml"
        words = ["-m", "edgekit", "bench", remote, "-w", workload_path, "--json", *self.spec.bench_options]
        limit = self.spec.limits.memory_bytes
        bounded = f"ulimit -d {limit >> 10}; " if limit is not None else ""
        # We hold the lease, so a running program is left from our own interrupted attempt and is ended first. `timeout`
        # ends the new one if the connection is lost.
        running = shlex.quote(f"{self.folder}/running-{self._owner}")
        end_left_over = f'p=$(cat {running} 2>/dev/null) && ps -o args= -p "$p" 2>/dev/null | grep -q "edgekit bench"'
        command = (
            f"(umask 077; cat > {shlex.quote(workload_path)}) || exit 1; "
            f'{end_left_over} && kill -9 -- "-$p"; {bounded}{environment} timeout -k 5 {timeout_s:.0f} {self._python} '
            f"{shlex.join(words)} & echo $! > {running}; wait $!"
        )
        # JSON is YAML, and this one has the texts of all its files inlined.
        answer = self._ask(command, timeout_s + 10, work.model_dump_json().encode(), may_exit=(0, 4))
        return read_measurement(
            answer, who=self.name, artifact_sha256=sealed.sha256, workload_sha256=self.spec.asked(work).sha256
        )

    def stop(self) -> None:
        self._programs.stop()

    def _push(self, sealed: Artifact, timeout_s: float) -> str:
        """Send the artifact and return its remote folder; existing files are skipped, partial ones continued."""
        remote_folder = f"{self.folder}/{sealed.sha256}"
        # The manifest goes last: a folder without one is incomplete.
        names = [*sealed.manifest.files, MANIFEST]
        folders = [
            remote_folder,
            *sorted({f"{remote_folder}/{name.rpartition('/')[0]}" for name in names if "/" in name}),
        ]
        sizes = self._sizes(remote_folder, folders, timeout_s)
        for name in names:
            path = sealed.folder / name
            if sizes.get(name) != path.stat().st_size:
                self._push_file(path, f"{remote_folder}/{name}", timeout_s, sizes.get(f"{name}.part", 0))
        return remote_folder

    def _sizes(self, remote_folder: str, folders: Sequence[str], timeout_s: float) -> dict[str, int]:
        """Return the size of every remote file below `place`; make `place` and `folders` if they are missing."""
        listing = f"umask 077; mkdir -p {shlex.join(folders)} && cd {shlex.quote(remote_folder)} && "
        listing += "find . -type f -exec wc -c {} \\;"
        lines = [line.split() for line in self._ask(listing, timeout_s).decode("utf-8", "replace").splitlines()]
        return {line[1].removeprefix("./"): int(line[0]) for line in lines if len(line) == 2 and line[0].isdigit()}

    def _push_file(self, path: Path, target: str, timeout_s: float, held: int) -> None:
        """Send a file from byte `held` on; it gets its final name after its hash is checked."""
        size, part = path.stat().st_size, shlex.quote(f"{target}.part")
        offset = held if 0 < held < size else 0
        whole = f'[ "$(sha256sum < {part})" = "{file_sha256(path)}  -" ] && mv {part} {shlex.quote(target)}'
        finish = f" && {{ {whole} && echo whole || rm -f {part}; }}"
        with path.open("rb") as file:
            file.seek(offset)
            answer = b""
            while not answer:
                block = file.read(_STEP_BYTES)
                way, is_last = ">" if file.tell() == len(block) else ">>", file.tell() >= size
                answer = self._ask(f"umask 077; cat {way} {part}{finish if is_last else ''}", timeout_s, block)
                if is_last and answer.strip() != b"whole":
                    raise DeviceUnreachable(f"{self.name}: {path.name} arrived damaged and was removed")

    def _ask(self, command: str, timeout_s: float, stdin: bytes = b"", may_exit: tuple[int, ...] = (0,)) -> bytes:
        """Return the output of a remote command. A lost machine and a non-zero exit code raise different errors."""
        ended = self._programs.run([*self._ssh(), command], timeout_s, stdin=stdin)
        if ended.code in _LOST or ended.code < 0:
            raise DeviceUnreachable(f"{self.name}: the connection or the program was lost: {ended.last_line}")
        if ended.code not in may_exit:
            raise exit_error(self.name, ended)
        return ended.answer

    def _ssh(self) -> list[str]:
        options = self.spec.options
        command = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=10",
                   "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ForwardAgent=no"]  # fmt: skip
        if "known_hosts" in options:
            command += ["-o", f"UserKnownHostsFile={options['known_hosts']}", "-o", "GlobalKnownHostsFile=/dev/null"]
        if "identity" in options:
            command += ["-o", "IdentitiesOnly=yes", "-i", str(options["identity"])]
        if "port" in options:
            command += ["-p", str(options["port"])]
        if self._user:
            command += ["-l", self._user]
        return [*command, "--", str(self.spec.address)]
