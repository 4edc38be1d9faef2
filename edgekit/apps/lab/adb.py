"""Phones reached through the system's `adb`: artifact and native runner are pushed once, by content, and measured.

The phone is kept awake and given time to cool down; its reported state becomes part of the measurement's conditions.
Its answers are untrusted.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from time import monotonic

from edgekit import load_profile
from edgekit.apps.bench import LOADS, Measurement, TrialStatus, read_workload
from edgekit.apps.lab.adb_shell import Shell
from edgekit.apps.lab.devices import MAX_ANSWER_BYTES, DeviceSpec, read_measurement
from edgekit.apps.lab.phone_state import ASKED, PhoneState, meminfo_bytes, phone_state
from edgekit.apps.lab.programs import ProgramResult, exit_error, lease
from edgekit.apps.lab.runner_job import check_answer, job_of
from edgekit.common.files import file_sha256
from edgekit.contracts.device import THIS, THIS_CPU
from edgekit.contracts.manifest import MANIFEST
from edgekit.errors import DeviceFailed, DeviceUnreachable, InvalidInput, WorkloadFailed, quote_short

_OPTIONS = {"runner": str, "adb": str, "folder": str, "min_battery": int, "repeats": int, "loads": int}
_FOLDER = "/data/local/tmp/edgekit"
_MACHINES = {"arm64-v8a": 183, "armeabi-v7a": 40, "x86_64": 62, "x86": 3}  # ABI → machine of an ELF file
_LOST = (124, 137, 143)  # exit codes of `timeout` and of a killed program
_ASK_S = 60.0
_RESTORE_S = 20.0


class AdbDevice:
    """Runs a native runner on a phone, where `timeout` ends it even if the connection is lost."""

    poll_s = 5.0  # interval of checks while a phone is too hot

    def __init__(self, spec: DeviceSpec, profiles: Sequence[Path] = ()) -> None:
        spec.check_options(_OPTIONS)
        if spec.address is None or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}", spec.address):
            raise InvalidInput(
                f"{spec.name}: address: give a serial of `adb devices`, found {quote_short(spec.address)}"
            )
        if spec.profile in (THIS, THIS_CPU):
            raise InvalidInput(f"{spec.name}: profile: name the phone's, e.g. pixel-9; see `edgekit devices`")
        folder = str(spec.options.get("folder", _FOLDER))
        if not re.fullmatch(r"/[A-Za-z0-9_./-]{0,200}", folder) or ".." in folder:
            raise InvalidInput(
                f"{spec.name}: folder {quote_short(folder)}: give a plain path from the root of the phone"
            )
        self.name, self.spec, self.profile = spec.name, spec, load_profile(spec.profile, profiles)
        self.folder, self._runner = folder, _runner(spec)
        self._shell = self._speaks()
        self._stopped = Event()

    def ping(self, *, timeout_s: float) -> str:
        self._shell.state(timeout_s)
        state = self._state(timeout_s)
        self._check_machine(state)
        return str(state)

    @contextmanager
    def acquire(self, *, timeout_s: float) -> Iterator[None]:
        """Hold the phone's lease and keep its screen on while plugged in, for the length of the block."""
        with lease(f"adb {self.spec.address}", self.name, timeout_s):
            before = self._state(_ASK_S).stays_on
            try:
                self._shell.ask("svc power stayon true; input keyevent KEYCODE_WAKEUP; true", _ASK_S)
                yield
            finally:
                # A new shell, because `stop` may have ended this one.
                put_back = f"settings put global stay_on_while_plugged_in {before or '0'}"
                with suppress(DeviceFailed):
                    self._speaks().ask(f"{self._end_running()}; {put_back}", _RESTORE_S)

    def measure(self, artifact: Path, workload: Path, *, timeout_s: float) -> Measurement:
        work = read_workload(workload)
        work, loads = self.spec.asked(work), self.spec.options.get("loads", LOADS)
        job = job_of(artifact, work, loads=int(loads))
        before = self._ready()
        sending_s = max(timeout_s, _ASK_S)
        remote = f"{self.folder}/{job.artifact_sha256}"
        runner = f"{self.folder}/runner-{file_sha256(self._runner)[:16]}"
        self._shell.push(self._runner, runner, sending_s, runs=True)
        # The manifest goes last: a folder without one is incomplete.
        for name in (job.program, MANIFEST):
            self._shell.push(artifact / name, f"{remote}/{name}", sending_s)
        scratch = f"{self.folder}/asked-{secrets.token_hex(8)}"
        # We hold the lease, so a leftover runner and files are from our own interrupted attempt.
        self._shell.ask(f"{self._end_running()}; rm -rf {self.folder}/asked-*", _ASK_S)
        try:
            with TemporaryDirectory() as scratch_folder:
                path = Path(scratch_folder) / "question.json"
                path.write_text(job.model_dump_json())
                self._shell.push(path, f"{scratch}/question.json", sending_s)
            answer, meminfo = self._answer(runner, remote, scratch, timeout_s)
        finally:
            with suppress(DeviceFailed):
                self._shell.ask(f"rm -rf {shlex.quote(scratch)}", _ASK_S)
        measurement = read_measurement(
            answer, who=self.name, artifact_sha256=job.artifact_sha256, workload_sha256=work.sha256
        )
        return self._with_phone_state(check_answer(job, measurement, self.name), before, self._state(_ASK_S), meminfo)

    def stop(self) -> None:
        self._stopped.set()
        self._shell.stop()

    def _answer(self, runner: str, remote: str, scratch: str, timeout_s: float) -> tuple[bytes, int | None]:
        """Run the runner; return its output and its memory at the end, as counted by Android."""
        answer, reported, meminfo = (f"{scratch}/{name}" for name in ("answer", "told", "meminfo"))
        running, limit = shlex.quote(f"{self.folder}/running"), self.spec.limits.memory_bytes
        bounded = f"ulimit -d {limit >> 10}; " if limit is not None else ""
        environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.spec.environment.items())
        words = shlex.join([runner, "measure", remote, f"{scratch}/question.json", "--meminfo", meminfo])
        # `timeout` ends the runner if the connection is cut.
        work = f"echo $$ > {running}; exec {words}"
        ended = self._shell.run(
            f"{bounded}{environment} timeout -k 5 {timeout_s:.0f} sh -c {shlex.quote(work)} "
            f"< /dev/null > {shlex.quote(answer)} 2> {shlex.quote(reported)}",
            timeout_s + 15,
        )
        # 4: measured, but every trial was disturbed.
        if ended.code not in (0, 4):
            last_line = self._shell.ask(f"tail -n 1 {shlex.quote(reported)}; rm -f {running}", _ASK_S).strip()
            if ended.code in _LOST:
                raise DeviceUnreachable(
                    f"{self.name}: the runner was ended on the phone (exit code {ended.code}: out of time or memory): "
                    f"{quote_short(last_line)}"
                )
            raise exit_error(self.name, ProgramResult(ended.code, b"", quote_short(last_line, 300)))
        data = self._shell.pull(answer, max(timeout_s, _ASK_S), MAX_ANSWER_BYTES)
        counted = self._shell.ask(f"head -c 200000 {shlex.quote(meminfo)} 2>/dev/null || true; rm -f {running}", _ASK_S)
        return data, meminfo_bytes(counted)

    def _end_running(self) -> str:
        """Return the shell command that ends a runner left running on the phone."""
        running = shlex.quote(f"{self.folder}/running")
        is_runner = f"p=$(cat {running}) && grep -q {self.folder}/runner- /proc/$p/cmdline"
        return f"{{ {is_runner} && kill -9 $p; rm -f {running}; }} 2>/dev/null"

    def _ready(self) -> PhoneState:
        """Wait until the phone is awake, cool and charged enough. Raises `DeviceUnreachable` if that fails."""
        state = self._state(_ASK_S)
        self._check_machine(state)
        least = int(self.spec.options.get("min_battery", 20))
        if state.is_saving_power:
            raise DeviceUnreachable(f"{self.name}: saves its battery, which slows it; turn battery saver off")
        if state.battery_percent is not None and state.battery_percent < least and not state.is_plugged:
            raise DeviceUnreachable(f"{self.name}: battery {state.battery_percent} %, less than {least} %; plug it in")
        if state.is_awake is False:
            self._shell.ask("input keyevent KEYCODE_WAKEUP; true", _ASK_S)
            state = self._state(_ASK_S)
            if state.is_awake is False:
                raise DeviceUnreachable(f"{self.name}: its screen is {quote_short(state.screen)}; wake it by hand")
        ends = monotonic() + self.spec.limits.cool_down_s
        while state.thermal and monotonic() < ends and not self._stopped.wait(self.poll_s):
            state = self._state(_ASK_S)
        if state.thermal:
            waited = self.spec.limits.cool_down_s
            raise DeviceUnreachable(
                f"{self.name}: thermal status {state.thermal_words} after {waited:g} s; let it cool"
            )
        return state

    def _with_phone_state(
        self, measurement: Measurement, before: PhoneState, after: PhoneState, counted_bytes: int | None
    ) -> Measurement:
        """Add the phone's state to a measurement; mark it as disturbed if the phone was hot or asleep."""
        status: TrialStatus = measurement.status
        why = measurement.why
        if status in ("valid", "contended", "throttled"):
            if after.thermal:
                status, why = "throttled", f"thermal status {after.thermal_words} when it ended"
            elif after.is_awake is False:
                status, why = "contended", f"the screen was {after.screen} when it ended"
        conditions = measurement.conditions
        power = None if after.is_plugged is None else "mains" if after.is_plugged else "battery"
        reported = {"power source": power, "temperature": after.temperature_c}
        key = hashlib.sha256(f"adb {self.spec.address} {after.model} {after.abi}".encode()).hexdigest()[:16]
        conditions = conditions.model_copy(
            update={
                "machine": f"{after.model} ({conditions.machine})"[:2000],
                "machine_key": key,
                "os": f"{after.os}, {conditions.os}"[:2000],
                "power_source": power or conditions.power_source,
                "temperature_c": conditions.temperature_c if after.temperature_c is None else after.temperature_c,
                "not_told": tuple(name for name in conditions.not_told if reported.get(name) is None),
            }
        )
        memory = measurement.memory
        notes = [f"before: {before}"[:2000], f"after: {after}"[:2000]]
        if counted_bytes is not None:
            notes.append(f"dumpsys meminfo counts {counted_bytes:,} bytes at its end, memory of graphics included")
            if memory.pss_bytes is None:
                memory = memory.model_copy(update={"pss_bytes": counted_bytes})
        return measurement.model_copy(
            update={"status": status, "why": why, "conditions": conditions, "memory": memory,
                    "notes": (*measurement.notes, *notes)}
        )  # fmt: skip

    def _state(self, timeout_s: float) -> PhoneState:
        return phone_state(self._shell.ask_each(ASKED, timeout_s))

    def _speaks(self) -> Shell:
        assert self.spec.address is not None
        return Shell(self.name, self.spec.address, str(self.spec.options.get("adb", "adb")))

    def _check_machine(self, state: PhoneState) -> None:
        machine = _MACHINES.get(state.abi)
        if machine is None:
            raise WorkloadFailed(f"{self.name}: has ABI {quote_short(state.abi)}; known are {', '.join(_MACHINES)}")
        with self._runner.open("rb") as file:
            head = file.read(20)
        if head[:4] != b"\x7fELF" or int.from_bytes(head[18:20], "little") != machine:
            raise InvalidInput(
                f"{self.name}: {self._runner}: is not a program for {state.abi}; build the runner for it"
            )


def _runner(spec: DeviceSpec) -> Path:
    given = spec.options.get("runner")
    if given is None or not Path(str(given)).is_file():
        problem = "is missing" if given is None else f"{given} is not a file"
        raise InvalidInput(f"{spec.name}: option runner {problem}; build examples/runner for the phone and name it")
    return Path(str(given))
