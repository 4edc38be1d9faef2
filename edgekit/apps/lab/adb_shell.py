"""The shell and the files of one phone, through the system's `adb`.

The exit code of a command is read from a marker that it prints last: adb's own exit code differs between versions of
Android, and some report a broken connection as success.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from edgekit.apps.lab.programs import ProgramResult, Programs, exit_error
from edgekit.common.files import file_sha256
from edgekit.errors import DeviceUnreachable, WorkloadFailed, quote_short

# adb's messages for a push that the phone refused.
_REFUSED_THERE = ("No space left on device", "Permission denied", "Read-only file system", "Is a directory")


class Shell:
    """The phone with one serial number. `stop` may be called from any thread."""

    def __init__(self, who: str, serial: str, adb: str = "adb") -> None:
        self.who, self.serial, self._adb = who, serial, adb
        self._programs = Programs(who)

    def ask(self, command: str, timeout_s: float, may_exit: tuple[int, ...] = (0,)) -> str:
        """Return the output of a shell command. A lost phone and a non-zero exit code raise different errors."""
        ended = self.run(command, timeout_s)
        if ended.code not in may_exit:
            raise exit_error(self.who, ended)
        return ended.answer.decode("utf-8", "replace")

    def run(self, command: str, timeout_s: float) -> ProgramResult:
        """Run a shell command to completion. Raises `DeviceUnreachable` if the phone is lost before."""
        mark = f"edgekit-{secrets.token_hex(8)}"
        ended = self._run(["shell", f"{{ {command}\n}}; c=$?; echo; echo {mark} $c"], timeout_s)
        # Old phones answer through a terminal, with CRLF line ends.
        answer, mark_found, code = ended.answer.replace(b"\r\n", b"\n").rpartition(f"\n{mark} ".encode())
        if not mark_found or not code.strip().isdigit():
            raise DeviceUnreachable(f"{self.who}: adb lost {self.serial}: exit code {ended.code}: {ended.last_line}")
        return ProgramResult(int(code), answer, ended.last_line)

    def ask_each(self, commands: Mapping[str, str], timeout_s: float) -> dict[str, str]:
        """Run several commands in one call; return the output of each, empty for a command that the phone lacks."""
        mark = f"edgekit-{secrets.token_hex(8)}"
        script = "\n".join(f"echo; echo {mark} {name}; {command} 2>/dev/null" for name, command in commands.items())
        outputs = {}
        for part in self.ask(f"{script}\ntrue", timeout_s).split(f"\n{mark} ")[1:]:
            name, _, text = part.partition("\n")
            outputs[name] = text
        return outputs

    def push(self, path: Path, target: str, timeout_s: float, *, runs: bool = False) -> None:
        """Copy a file to the phone unless it exists; it gets its final name after its hash is checked."""
        there, part, folder = shlex.quote(target), f"{target}.part", shlex.quote(target.rpartition("/")[0])
        size = self.ask(f"umask 077; mkdir -p {folder} && if [ -f {there} ]; then wc -c < {there}; fi", timeout_s)
        if size.strip() == str(path.stat().st_size):
            return
        ended = self._transfer(["push", str(path), part], timeout_s)
        quoted = shlex.quote(part)
        if ended.code != 0:
            refused = any(word in ended.last_line for word in _REFUSED_THERE)
            if refused:
                self.ask(f"rm -f {quoted}", timeout_s)
                raise exit_error(self.who, ended)
            raise DeviceUnreachable(f"{self.who}: adb lost {self.serial} at {path.name}: {ended.last_line}")
        mode = f"chmod 755 {quoted} && " if runs else ""
        whole = f'case "$(sha256sum < {quoted})" in {file_sha256(path)}*) {mode}mv {quoted} {there} && echo whole;; '
        answer = self.ask(f"{whole}*) rm -f {quoted};; esac", timeout_s)
        if answer.strip() != "whole":
            raise DeviceUnreachable(f"{self.who}: {path.name} arrived damaged and was removed")

    def pull(self, target: str, timeout_s: float, most_bytes: int) -> bytes:
        """Return the content of a file on the phone. Raises if it exceeds `most_bytes`."""
        size = self.ask(f"wc -c < {shlex.quote(target)}", timeout_s).strip()
        if not size.isdigit() or int(size) > most_bytes:
            raise WorkloadFailed(f"{self.who}: {target} has {quote_short(size)} bytes; at most {most_bytes:,} are read")
        with TemporaryDirectory() as folder:
            path = Path(folder) / "pulled"
            ended = self._transfer(["pull", target, str(path)], timeout_s)
            if ended.code != 0 or not path.is_file():
                raise DeviceUnreachable(f"{self.who}: adb lost {self.serial} at {target}: {ended.last_line}")
            if path.stat().st_size > most_bytes:
                raise WorkloadFailed(f"{self.who}: {target} grew while it was read; at most {most_bytes:,} are read")
            return path.read_bytes()

    def state(self, timeout_s: float) -> None:
        """Raise `DeviceUnreachable` unless adb reports that the phone is connected and authorised."""
        ended = self._run(["get-state"], timeout_s)
        said = ended.answer.decode("utf-8", "replace").strip()
        if ended.code != 0 or said != "device":
            raise DeviceUnreachable(f"{self.who}: {self.serial}: {said or ended.last_line}")

    def stop(self) -> None:
        self._programs.stop()

    def _run(self, words: list[str], timeout_s: float) -> ProgramResult:
        return self._programs.run([self._adb, "-s", self.serial, *words], timeout_s)

    def _transfer(self, words: list[str], timeout_s: float) -> ProgramResult:
        """Run a push or pull; some versions of adb print errors to stdout, where others print progress."""
        ended = self._run(words, timeout_s)
        lines = [line for line in ended.answer.decode("utf-8", "replace").splitlines() if "error" in line]
        return ended._replace(last_line=quote_short(lines[-1].strip(), 300)) if lines else ended
