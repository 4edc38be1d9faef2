"""A lab of 10,000 cells: run, killed by SIGKILL half way, and resumed. What scheduling costs, and whether memory grows.

    python -m examples.benchmarks.lab_scale [--cells 10000] [--json docs/data/lab-scale.json]

Ten devices answer at once with a measurement that was really made, so all that is left is the lab itself: taking a
cell, a commit that is on the disk before the next step, and the result's own bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgekit.common.files import write_file
from edgekit.device.load import load_profile
from edgekit.lab.devices import DeviceSpec, connect
from edgekit.lab.matrix import Lab, entries_of
from edgekit.lab.report import report_of, rows_of
from edgekit.lab.run import EntryEvent, new_run, run_lab
from edgekit.lab.store import LabStore
from edgekit.measure.bench.measurement import Measurement
from edgekit.measure.report.markdown import markdown
from edgekit.measure.report.results import Figures, Report
from edgekit.testing import fake_artifact, fake_model, fake_plan, install_fake_target

TOKENIZER = Path(__file__).parents[1] / "training" / "demo" / "target"
DEVICES, WORKLOADS, EARLY = 10, ("quick", "chat"), 1000
PROFILE = "raspberry-pi-5-8gb"


class ReadyDevice:
    """Has every answer already."""

    def __init__(self, name: str, answers: dict[tuple[str, str], Measurement]) -> None:
        self.name, self.profile, self._answers = name, load_profile(PROFILE), answers

    def ping(self, *, timeout_s: float) -> str:
        return "ready"

    @contextmanager
    def acquire(self, *, timeout_s: float) -> Iterator[None]:
        yield

    def measure(self, artifact: Path, workload: Path, *, timeout_s: float) -> Measurement:
        return self._answers[str(artifact), str(workload)]

    def stop(self) -> None:
        pass


def make_artifacts(folder: Path) -> list[str]:
    """Two sealed artifacts of the fake target, whose text is real."""
    words = (TOKENIZER / "tokenizer.json").read_text()
    files = {"tokenizer.json": words, "tokenizer_config.json": (TOKENIZER / "tokenizer_config.json").read_text()}
    plan = fake_plan(fake_model(vocabulary=max(json.loads(words)["model"]["vocab"].values()) + 1), context=2048)
    paths = [folder / name for name in ("one", "two")]
    for seed, path in enumerate(paths):
        fake_artifact(path, files=files, plan=plan, seed=seed)
    return [str(path) for path in paths]


def measured(folder: Path, artifacts: list[str]) -> dict[tuple[str, str], Measurement]:
    """One answer of the real bench, used for every question."""
    install_fake_target(folder / "site")
    spec = DeviceSpec(
        name="here",
        kind="local",
        profile=PROFILE,
        environment={"PYTHONPATH": str(folder / "site"), "EDGEKIT_HOME": str(folder / "home")},
    )
    device = connect(spec)
    return {
        (artifact, workload): device.measure(Path(artifact), Path(workload), timeout_s=600)
        for artifact in artifacts
        for workload in WORKLOADS
    }


def resident_bytes(field: str = "VmRSS") -> int:
    """Return a memory figure of this process from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def drive(folder: Path, run: str) -> None:
    """Run the entries that still wait, in one process of the lab."""
    kept = json.loads((folder / "answers.json").read_text())
    # A disturbed answer would be asked for again; here each question is asked once.
    answers = {
        (one["artifact"], one["workload"]): Measurement.model_validate_json(one["found"]).model_copy(
            update={"status": "valid", "why": ""}
        )
        for one in kept
    }
    with LabStore(folder / "lab.sqlite") as store:
        lab = store.lab(run)
        ended, early = 0, 0

        def watch(event: EntryEvent) -> None:
            nonlocal ended, early
            ended += event.state == "done"
            if event.state == "done" and ended == EARLY:
                early = resident_bytes()

        devices = {spec.name: ReadyDevice(spec.name, answers) for spec in lab.devices}
        began, used = time.perf_counter(), time.process_time()
        run_lab(lab, store, run, devices, watch=watch)
        found: dict[str, Any] = {
            "cells": ended,
            "wall_s": time.perf_counter() - began,
            "processor_s": time.process_time() - used,
            "early_bytes": early,
            "late_bytes": resident_bytes(),
            "peak_bytes": resident_bytes("VmHWM"),
        }
        began = time.perf_counter()
        rows = list(rows_of(store, run))
        text = markdown(report_of(store, run, rows, None))
        found |= {
            "report_s": time.perf_counter() - began,
            "said": next(line for line in text.splitlines() if "cells:" in line),
        }
    sys.stdout.write(json.dumps(found))


def driven(folder: Path, run: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--drive", str(folder), run], stdout=subprocess.PIPE)


def done(store: LabStore, run: str) -> int:
    return store.info(run).states.get("done", 0)


def tried(folder: Path, entries: int) -> dict[str, Any]:
    """Begin, kill half way, resume; what each process took."""
    artifacts = make_artifacts(folder)
    answers = [
        {"artifact": artifact, "workload": workload, "found": found.model_dump_json()}
        for (artifact, workload), found in measured(folder, artifacts).items()
    ]
    (folder / "answers.json").write_text(json.dumps(answers))
    lab = Lab(
        name="scale",
        devices=tuple(DeviceSpec(name=f"device-{number}", kind="ready") for number in range(DEVICES)),
        artifacts=tuple(artifacts),
        workloads=WORKLOADS,
        repeats=entries // (DEVICES * len(artifacts) * len(WORKLOADS)),
    )
    with LabStore(folder / "lab.sqlite") as store:
        run = new_run()
        began = time.perf_counter()
        store.begin(
            run, lab, entries_of(lab, {spec.name: [*map(Path, artifacts)] for spec in lab.devices}), time.time()
        )
        begin_s = time.perf_counter() - began
        total = sum(store.info(run).states.values())
        first = driven(folder, run)
        while done(store, run) < total // 2:
            if first.poll() is not None:
                raise RuntimeError("the run ended before it could be killed")
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        before = done(store, run)
        second = driven(folder, run)
        told, _ = second.communicate()
        if second.returncode:
            raise RuntimeError("the resumed run failed")
        attempts = [one.outcome for one in store.attempts(run)]
        return {
            "cells": total,
            "begin_s": begin_s,
            "done_before_the_kill": before,
            "done_at_the_end": done(store, run),
            "attempts_stopped_by_the_kill": attempts.count("stopped"),
            "measured_twice": attempts.count("measured") - total,
            "answer_bytes": len(answers[0]["found"]),
            "resumed": json.loads(told),
        }


def report(found: dict[str, Any]) -> Report:
    """The figures as a page shows them."""
    resumed = found["resumed"]
    each, processor = (resumed[name] / resumed["cells"] * 1e3 for name in ("wall_s", "processor_s"))
    grown = resumed["late_bytes"] - resumed["early_bytes"]
    rows = [
        ("cells", f"{found['cells']:,} on {DEVICES} devices, {found['answer_bytes'] / 1e3:.0f} kB an answer"),
        ("writing them all down before the first", f"{found['begin_s']:.2f} s"),
        ("done when the lab was killed (SIGKILL)", f"{found['done_before_the_kill']:,}"),
        ("done by the run that went on", f"{resumed['cells']:,}"),
        ("results lost, results doubled", f"{found['cells'] - found['done_at_the_end']}, {found['measured_twice']}"),
        ("attempts that the kill stopped", str(found["attempts_stopped_by_the_kill"])),
        ("scheduling a cell, its result's commit on the disk included", f"{each:.2f} ms"),
        ("of it, processor time", f"{processor:.2f} ms"),
        (
            f"memory after {EARLY:,} cells, and at the end",
            f"{resumed['early_bytes'] / 1e6:.1f} MB, {grown / 1e6:+.1f} MB",
        ),
        ("the report of all cells", f"{resumed['report_s']:.1f} s"),
    ]
    table = Figures(
        title="A run that is killed half way and resumed",
        head=("figure", "value"),
        rows=tuple(rows),
        source="examples/benchmarks/lab_scale.py",
    )
    load = os.getloadavg()[0]
    return Report(
        title="Device lab: 10,000 cells",
        tables=(table,),
        notes=(f"Load average {load:.1f} on {os.cpu_count()} cores when it ended.",),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.drive:
        drive(Path(asked.drive[0]), asked.drive[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        made = report(tried(Path(folder), asked.entries))
    print(markdown(made))
    if asked.json:
        write_file(asked.json, (made.model_dump_json(indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
