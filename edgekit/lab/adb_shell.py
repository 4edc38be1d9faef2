"""One phone's shell and files, through the system's own `adb`. Knows no artifacts and measures nothing.

Whether a command ended, and how, is read from a mark that it prints last: what adb exits with differs between versions
of Android, and a connection that breaks looks like success to some.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from edgekit.errors import DeviceUnreachable, WorkloadFailed, clip
from edgekit.files import file_sha256
from edgekit.lab.programs import Ended, Programs, refusal

# What adb says of a push that reached the phone and was refused there.
_REFUSED_THERE = ("No space left on device", "Permission denied", "Read-only file system", "Is a directory")


class Shell:
    """The phone with that serial. `stop` may be called from any thread."""

    def __init__(self, who: str, serial: str, adb: str = "adb") -> None:
        self.who, self.serial, self._adb = who, serial, adb
        self._programs = Programs(who)

    def ask(self, command: str, timeout_s: float, may_exit: tuple[int, ...] = (0,)) -> str:
        """What a command of the phone's shell prints. Losing the phone is one error, its refusal another."""
        ended = self.run(command, timeout_s)
        if ended.code not in may_exit:
            raise refusal(self.who, ended)
        return ended.answer.decode("utf-8", "replace")

    def run(self, command: str, timeout_s: float) -> Ended:
        """The same with the exit code over there; the phone is lost unless the command ended."""
        mark = f"edgekit-{secrets.token_hex(8)}"
        ended = self._run(["shell", f"{{ {command}\n}}; c=$?; echo; echo {mark} $c"], timeout_s)
        # Old phones talk through a terminal, and end lines as terminals do.
        answer, found, code = ended.answer.replace(b"\r\n", b"\n").rpartition(f"\n{mark} ".encode())
        if not found or not code.strip().isdigit():
            raise DeviceUnreachable(f"{self.who}: adb lost {self.serial}: exit code {ended.code}: {ended.told}")
        return Ended(int(code), answer, ended.told)

    def ask_each(self, commands: Mapping[str, str], timeout_s: float) -> dict[str, str]:
        """What each of several commands prints, in one trip; one that the phone lacks prints nothing."""
        mark = f"edgekit-{secrets.token_hex(8)}"
        script = "\n".join(f"echo; echo {mark} {name}; {command} 2>/dev/null" for name, command in commands.items())
        found = {}
        for part in self.ask(f"{script}\ntrue", timeout_s).split(f"\n{mark} ")[1:]:
            name, _, text = part.partition("\n")
            found[name] = text
        return found

    def push(self, path: Path, target: str, timeout_s: float, *, runs: bool = False) -> None:
        """A file that is there under its name is whole: it gets the name once its hash is right over there."""
        there, part, folder = shlex.quote(target), f"{target}.part", shlex.quote(target.rpartition("/")[0])
        size = self.ask(f"umask 077; mkdir -p {folder} && if [ -f {there} ]; then wc -c < {there}; fi", timeout_s)
        if size.strip() == str(path.stat().st_size):
            return
        ended = self._transfer(["push", str(path), part], timeout_s)
        quoted = shlex.quote(part)
        if ended.code != 0:
            refused = any(word in ended.told for word in _REFUSED_THERE)
            if refused:
                self.ask(f"rm -f {quoted}", timeout_s)
                raise refusal(self.who, ended)
            raise DeviceUnreachable(f"{self.who}: adb lost {self.serial} at {path.name}: {ended.told}")
        mode = f"chmod 755 {quoted} && " if runs else ""
        whole = f'case "$(sha256sum < {quoted})" in {file_sha256(path)}*) {mode}mv {quoted} {there} && echo whole;; '
        told = self.ask(f"{whole}*) rm -f {quoted};; esac", timeout_s)
        if told.strip() != "whole":
            raise DeviceUnreachable(f"{self.who}: {path.name} arrived damaged and was removed")

    def pull(self, target: str, timeout_s: float, most_bytes: int) -> bytes:
        """A file of the phone, where it is no larger than that."""
        size = self.ask(f"wc -c < {shlex.quote(target)}", timeout_s).strip()
        if not size.isdigit() or int(size) > most_bytes:
            raise WorkloadFailed(f"{self.who}: {target} has {clip(size)} bytes; at most {most_bytes:,} are read")
        with TemporaryDirectory() as folder:
            path = Path(folder) / "pulled"
            ended = self._transfer(["pull", target, str(path)], timeout_s)
            if ended.code != 0 or not path.is_file():
                raise DeviceUnreachable(f"{self.who}: adb lost {self.serial} at {target}: {ended.told}")
            if path.stat().st_size > most_bytes:
                raise WorkloadFailed(f"{self.who}: {target} grew while it was read; at most {most_bytes:,} are read")
            return path.read_bytes()

    def state(self, timeout_s: float) -> None:
        """Raises `DeviceUnreachable` unless adb says that the phone is there and may be used."""
        ended = self._run(["get-state"], timeout_s)
        said = ended.answer.decode("utf-8", "replace").strip()
        if ended.code != 0 or said != "device":
            raise DeviceUnreachable(f"{self.who}: {self.serial}: {said or ended.told}")

    def stop(self) -> None:
        self._programs.stop()

    def _run(self, words: list[str], timeout_s: float) -> Ended:
        return self._programs.run([self._adb, "-s", self.serial, *words], timeout_s)

    def _transfer(self, words: list[str], timeout_s: float) -> Ended:
        """A push or pull, whose errors some versions print where others print their progress."""
        ended = self._run(words, timeout_s)
        lines = [line for line in ended.answer.decode("utf-8", "replace").splitlines() if "error" in line]
        return ended._replace(told=clip(lines[-1].strip(), 300)) if lines else ended
