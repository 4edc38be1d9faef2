"""An app whose memory is capped as phones cap it: a process above the cap is killed without a word."""

from __future__ import annotations

import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from edgekit_llamacpp import library

from edgekit.cli import command

pytestmark = [
    pytest.mark.llamacpp,
    pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory from /proc"),
    # Not by importing it: a second llama.cpp in this process would be refused.
    pytest.mark.skipif(library.missing() is not None, reason=str(library.missing())),
]
_APP = """
import sys, edgekit
smallest = len(sys.argv) < 3
options = {"context": 512, "sequences": 1, "prefixes": 0} if smallest else {"sequences": 32, "guard": sys.argv[2]}
with edgekit.open(sys.argv[1], **options) as runtime:
    tokens = runtime.generate("def add(a, b):", max_tokens=12, ignore_eos=True).tokens
    print(len(tokens), runtime.kv_config.capacity_tokens, *runtime.notes, flush=True)
    sys.stdin.readline()
"""


def own_memory(process: int) -> int:
    """The bytes that a process does not share with files."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.M)
    return int(found[1]) << 10 if found else 0


def start(*arguments: object, cap: int | None = None) -> tuple[str, int, int]:
    """Run the app under a cap; return what it printed, its exit status and the most memory it had."""
    told = [sys.executable, "-c", _APP, *map(str, arguments)]
    most, printed = 0, ""
    with subprocess.Popen(told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None
        answers = select.poll()
        answers.register(app.stdout, select.POLLIN)
        while app.poll() is None:
            most = max(most, own_memory(app.pid))
            if cap is not None and most > cap:
                app.kill()
                app.wait()
            elif answers.poll(2):  # it has answered, and waits to be let go
                printed = app.communicate("\n")[0]
    return printed, app.returncode, most


def test_a_crash_loop_under_a_cap_on_memory_ends_in_a_smaller_setting(tmp_path: Path) -> None:
    artifact = tmp_path / "demo"
    words = ["export", "demo", "--target", "llamacpp", "--effort", "quick", "-o", str(artifact)]
    made = CliRunner().invoke(command, words)
    assert made.exit_code == 0, made.output
    _, code, least = start(artifact)
    assert code == 0
    cap = least + (80 << 20)
    _, code, most = start(artifact, tmp_path / "unused")
    assert code == 0 and most > cap + (40 << 20), "what the app asks for does not exceed the cap"
    starts = [start(artifact, tmp_path / "guard", cap=cap) for _ in range(4)]
    assert [code for _, code, _ in starts] == [-9, -9, 0, 0]
    for printed, _, memory in starts[2:]:
        assert printed.startswith("12 512 2 starts in a row died, the last while it was opened (context 2,048)")
        assert memory <= cap
