"""A lab of three machines behind ssh, two artifacts, two workloads: is it complete, parallel, and its report right?

    python -m examples.benchmarks.lab_hosts [--json docs/data/lab-hosts.json]

Three ssh servers on this machine's loopback stand for three machines; the way there is real. All three share these
cores, so three real measurements would disturb each other, as they should be told they do. What answers over there is
therefore a stand-in: it waits as long as that machine would work (2, 3 and 4 s), and then says a measurement that was
made here, at a speed of its own. Needs openssh-server and openssh-client; Linux.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgekit.apps.bench.report.markdown import markdown
from edgekit.apps.bench.report.results import Figures, Report
from edgekit.apps.lab.devices import DeviceSpec, connect
from edgekit.apps.lab.matrix import Lab, entries_of
from edgekit.apps.lab.report import exit_code, report_of, rows_of
from edgekit.apps.lab.run import new_run, run_lab
from edgekit.apps.lab.store import LabStore
from edgekit.common.files import write_file
from examples.benchmarks.lab_scale import PROFILE, make_artifacts, measured

WORKS_S = (2.0, 3.0, 4.0)
STAND_IN = """#!{python} -S
import hashlib, json, os, sys, time
if "--version" in sys.argv:
    sys.exit(print("edgekit stand-in"))
time.sleep({works_s})
found = json.load(open({answer!r}))
manifest = open(sys.argv[4] + "/manifest.json", "rb").read()
found["arm"]["artifact_sha256"] = hashlib.sha256(manifest).hexdigest()
found["workload_sha256"] = os.path.basename(sys.argv[6]).split(".")[0]
for case in found["cases"]:
    for value in ("median", "low", "high"):
        case["summary"]["decode_tokens_per_s"][value] = {speed}
print(json.dumps(found))
"""


@contextmanager
def hosts(folder: Path, answer: Path) -> Iterator[list[DeviceSpec]]:
    """Three servers, each with a home of its own, known by their keys; and how a lab reaches them."""
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    keys, running, specs = folder / "keys", [], []
    keys.mkdir(mode=0o700)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("client", "server"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True)
    try:
        for number, works_s in enumerate(WORKS_S):
            home = folder / f"host-{number}"
            home.mkdir()
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = int(free.getsockname()[1])
            config = (
                f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys / 'server'}\nPidFile none\nStrictModes no\n"
                f"AuthorizedKeysFile {keys / 'client.pub'}\nUsePAM no\nPasswordAuthentication no\n"
            )
            (home / "sshd_config").write_text(config)
            with (home / "log").open("wb") as log:
                running.append(subprocess.Popen([sshd, "-D", "-e", "-f", str(home / "sshd_config")], stderr=log))
            with (keys / "known_hosts").open("a") as known:
                known.write(f"[127.0.0.1]:{port} {(keys / 'server.pub').read_text()}")
            program = home / "stand-in"
            program.write_text(
                STAND_IN.format(python=sys.executable, works_s=works_s, answer=str(answer), speed=speed(number))
            )
            program.chmod(0o755)
            options: dict[str, Any] = {
                "port": port,
                "identity": str(keys / "client"),
                "known_hosts": str(keys / "known_hosts"),
                "folder": str(home / "lab"),
                "python": str(program),
            }
            specs.append(
                DeviceSpec(name=f"host-{number}", kind="ssh", profile=PROFILE, address="127.0.0.1", options=options)
            )
            while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
                time.sleep(0.05)
        yield specs
    finally:
        for process in running:
            process.kill()
            process.wait()


def speed(number: int) -> float:
    """Tokens per second that the host's answers report."""
    return 100.0 * (number + 1)


def tried(folder: Path) -> dict[str, Any]:
    artifacts = make_artifacts(folder)
    made = measured(folder, artifacts[:1])[artifacts[0], "quick"].model_copy(update={"status": "valid", "why": ""})
    answer = folder / "answer.json"
    answer.write_text(made.model_dump_json())
    with hosts(folder, answer) as specs, LabStore(folder / "lab.sqlite") as store:
        lab = Lab(name="hosts", devices=tuple(specs), artifacts=tuple(artifacts), workloads=("quick", "chat"))
        run = new_run()
        store.begin(run, lab, entries_of(lab, {spec.name: [*map(Path, artifacts)] for spec in specs}), time.time())
        began = time.perf_counter()
        run_lab(lab, store, run, {spec.name: connect(spec) for spec in specs})
        wall_s = time.perf_counter() - began
        rows = list(rows_of(store, run))
        where = {row.entry.id: row.entry.device for row in rows}
        own_s = dict.fromkeys((spec.name for spec in specs), 0.0)
        for one in store.attempts(run):
            own_s[where[one.entry]] += (one.ended_at or one.begun_at) - one.begun_at
        tables = {table.title.split()[1]: table for table in report_of(store, run, rows, None).tables}
        shown = {name: {row[table.head.index("decode tok/s")] for row in table.rows} for name, table in tables.items()}
        expected = {spec.name: {f"{speed(number):.1f}"} for number, spec in enumerate(specs)}
        return {
            "cells": len(rows),
            "complete": exit_code(rows) == 0,
            "wall_s": wall_s,
            "own_s": own_s,
            "report_is_right": {
                name: {" ".join(sorted(set(one.split()))) for one in found} for name, found in shown.items()
            }
            == expected,
        }


def report(found: dict[str, Any]) -> Report:
    own = found["own_s"]
    slowest, total = max(own.values()), sum(own.values())
    rows = [
        ("cells (3 hosts × 2 artifacts × 2 workloads)", str(found["cells"])),
        ("every cell has its result", "yes" if found["complete"] else "NO"),
        ("the report says of each host what it answered", "yes" if found["report_is_right"] else "NO"),
        *((f"{name}: its own work, transfers included", f"{seconds:.1f} s") for name, seconds in own.items()),
        ("all of it, one after the other", f"{total:.1f} s"),
        ("the run", f"{found['wall_s']:.1f} s"),
        ("the run over the slowest host's own work", f"{found['wall_s'] / slowest:.2f}"),
    ]
    table = Figures(
        title="Three hosts at once",
        head=("figure", "value"),
        rows=tuple(rows),
        source="examples/benchmarks/lab_hosts.py; own work is what the store's attempts took",
    )
    note = (
        f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores when it ended. Hosts wait instead of working."
    )
    return Report(title="Device lab: three hosts behind ssh", tables=(table,), notes=(note,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = report(tried(Path(folder)))
    print(markdown(made))
    if asked.json:
        write_file(asked.json, (made.model_dump_json(indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
