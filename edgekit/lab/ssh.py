"""A machine that is reached by the system's own ssh: the artifact goes there once, by content, and is measured there.

Host keys are always checked, nothing is ever typed in, and what the machine answers is untrusted.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edgekit.artifact import MANIFEST, Artifact, open_artifact
from edgekit.errors import DeviceUnreachable, InvalidInput, clip
from edgekit.files import file_sha256, home
from edgekit.lab.devices import DeviceSpec, read_measurement
from edgekit.lab.leases import lease
from edgekit.lab.local import asked_sha256
from edgekit.lab.prepared import prepare, python_there
from edgekit.lab.programs import Programs, refusal
from edgekit.measure.measurement import Measurement
from edgekit.measure.workload import read_workload
from edgekit.profiles import load_profile

_OPTIONS = {"user": str, "port": int, "identity": str, "known_hosts": str, "python": str, "folder": str,
            "repeats": int, "loads": int}  # fmt: skip
# What ssh exits with where the connection is the trouble, and what `timeout` and a kill over there look like here.
_LOST = (255, 124, 137)
_STEP_BYTES = 8 << 20


class SshDevice:
    """Runs `edgekit bench` on another machine. The far program ends with the connection."""

    can_prepare = True

    def __init__(self, spec: DeviceSpec, profiles: Sequence[Path] = ()) -> None:
        for name, value in spec.options.items():
            if name not in _OPTIONS or type(value) is not _OPTIONS[name]:
                raise InvalidInput(f"{spec.name}: option {clip(name)}: known are {', '.join(sorted(_OPTIONS))}")
        if spec.address is None or not re.fullmatch(r"[A-Za-z0-9_\[][A-Za-z0-9_.:\]-]{0,253}", spec.address):
            raise InvalidInput(f"{spec.name}: address: give the name or number of a host, found {clip(spec.address)}")
        user = str(spec.options.get("user", ""))
        if user and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", user):
            raise InvalidInput(f"{spec.name}: user {clip(user)}: is no name of a user")
        folder = str(spec.options.get("folder", ".cache/edgekit-lab"))
        if not re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./-]{0,200}", folder) or ".." in folder:
            raise InvalidInput(f"{spec.name}: folder {clip(folder)}: give a plain path")
        self.name, self.spec, self.profile = spec.name, spec, load_profile(spec.profile, profiles)
        self.folder, self._user = folder, user
        self._python = shlex.quote(str(spec.options.get("python", "python3")))
        self._programs = Programs(spec.name)
        self._owner = hashlib.sha256(f"{platform.node()} {home()}".encode()).hexdigest()[:16]

    def ping(self, *, timeout_s: float) -> str:
        prepare = self.spec.prepare
        if prepare is not None:
            found = python_there(self._ask, self._python, timeout_s)
            return f"Python {found}; {Path(prepare.wheel).name} is installed before the first measurement"
        return self._ask(f"{self._python} -m edgekit --version", timeout_s).decode("utf-8", "replace").strip()

    @contextmanager
    def acquire(self, *, timeout_s: float) -> Iterator[None]:
        with lease(f"ssh {self._user}@{self.spec.address}:{self.spec.options.get('port', 22)}", self.name, timeout_s):
            yield

    def measure(self, artifact: Path, workload: Path, *, timeout_s: float) -> Measurement:
        sealed = open_artifact(artifact)
        environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.spec.environment.items())
        python = self._python
        if self.spec.prepare is not None:
            python = prepare(
                self.spec.prepare, sealed.plan, self.folder, python, environment, self._ask, self._push_whole
            )
        there = self._push(sealed, timeout_s)
        asked = read_workload(workload)
        question = f"{self.folder}/{asked.sha256}.yaml"
        options = [f"--{name}={self.spec.options[name]}" for name in ("repeats", "loads") if name in self.spec.options]
        words = ["-m", "edgekit", "bench", there, "-w", question, "--json", *options]
        limit = self.spec.limits.memory_bytes
        bounded = f"ulimit -d {limit >> 10}; " if limit is not None else ""
        # Whoever holds the lease may end what an attempt left running when its connection was cut, or its lab killed;
        # `timeout` ends it where nobody comes back.
        running = shlex.quote(f"{self.folder}/running-{self._owner}")
        left = f'p=$(cat {running} 2>/dev/null) && ps -o args= -p "$p" 2>/dev/null | grep -q "edgekit bench"'
        command = (
            f"(umask 077; cat > {shlex.quote(question)}) || exit 1; "
            f'{left} && kill -9 -- "-$p"; {bounded}{environment} timeout -k 5 {timeout_s:.0f} {python} '
            f"{shlex.join(words)} & echo $! > {running}; wait $!"
        )
        # JSON is YAML, and this one has the words of all its files inside.
        answer = self._ask(command, timeout_s + 10, asked.model_dump_json().encode(), may_exit=(0, 4))
        return read_measurement(
            answer, who=self.name, artifact_sha256=sealed.sha256, workload_sha256=asked_sha256(workload, self.spec)
        )

    def stop(self) -> None:
        self._programs.stop()

    def _push(self, sealed: Artifact, timeout_s: float) -> str:
        """The artifact's folder there; what is there is not sent again, half a file goes on where it broke off."""
        place = f"{self.folder}/{sealed.sha256}"
        # The manifest goes last: a folder without one is not whole, whatever cut it off.
        names = [*sealed.manifest.files, MANIFEST]
        folders = [place, *sorted({f"{place}/{name.rpartition('/')[0]}" for name in names if "/" in name})]
        sizes = self._sizes(place, folders, timeout_s)
        for name in names:
            path = sealed.folder / name
            if sizes.get(name) != path.stat().st_size:
                self._push_file(path, f"{place}/{name}", timeout_s, sizes.get(f"{name}.part", 0))
        return place

    def _push_whole(self, path: Path, target: str, timeout_s: float) -> None:
        """One file under a path that only this content has."""
        place, _, name = target.rpartition("/")
        sizes = self._sizes(place, [place], timeout_s)
        if sizes.get(name) != path.stat().st_size:
            self._push_file(path, target, timeout_s, sizes.get(f"{name}.part", 0))

    def _sizes(self, place: str, folders: Sequence[str], timeout_s: float) -> dict[str, int]:
        """The size of every file below `place`, which is made with `folders` where it is not there."""
        listing = f"umask 077; mkdir -p {shlex.join(folders)} && cd {shlex.quote(place)} && "
        listing += "find . -type f -exec wc -c {} \\;"
        lines = [line.split() for line in self._ask(listing, timeout_s).decode("utf-8", "replace").splitlines()]
        return {line[1].removeprefix("./"): int(line[0]) for line in lines if len(line) == 2 and line[0].isdigit()}

    def _push_file(self, path: Path, target: str, timeout_s: float, held: int = 0) -> None:
        """Send what is missing of a file, of which `held` bytes are there; it gets its name once it is whole."""
        size, part = path.stat().st_size, shlex.quote(f"{target}.part")
        offset = held if 0 < held < size else 0
        whole = f'[ "$(sha256sum < {part})" = "{file_sha256(path)}  -" ] && mv {part} {shlex.quote(target)}'
        finish = f" && {{ {whole} && echo whole || rm -f {part}; }}"
        with path.open("rb") as file:
            file.seek(offset)
            told = b""
            while not told:
                block = file.read(_STEP_BYTES)
                way, is_last = ">" if file.tell() == len(block) else ">>", file.tell() >= size
                told = self._ask(f"umask 077; cat {way} {part}{finish if is_last else ''}", timeout_s, block)
                if is_last and told.strip() != b"whole":
                    raise DeviceUnreachable(f"{self.name}: {path.name} arrived damaged and was removed")

    def _ask(self, command: str, timeout_s: float, given: bytes = b"", may_exit: tuple[int, ...] = (0,)) -> bytes:
        """What a command there prints. Losing the machine is one error, its refusal another."""
        ended = self._programs.run([*self._ssh(), command], timeout_s, given=given)
        if ended.code in _LOST or ended.code < 0:
            raise DeviceUnreachable(f"{self.name}: the connection or the program was lost: {ended.told}")
        if ended.code not in may_exit:
            raise refusal(self.name, ended)
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
