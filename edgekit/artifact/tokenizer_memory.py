"""Measures the memory of a model's tokenizer in a child process.

It is measured because no formula predicts it: tokenizers with equal vocabulary sizes differ by a factor of two, and
parsing takes three times the memory that remains in use.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from edgekit.common.base import Frozen
from edgekit.common.bounds import Count
from edgekit.common.files import file_sha256
from edgekit.common.log import log
from edgekit.common.machine_facts import read_fact, write_fact
from edgekit.common.malloc import return_unused
from edgekit.common.packages import versions_of
from edgekit.common.proc import memory_sizes
from edgekit.common.units import MIB
from edgekit.contracts.plan import Plan
from edgekit.model.tokenizer_file import read_tokenizer
from edgekit.planner.changed_plan import with_facts

TOKENIZER = "tokenizer.json"
_LIMIT_S = 120.0
_STATUS = Path("/proc/self/status")
_FACT = "tokenizer-memory"


class TokenizerMemory(Frozen):
    """Private bytes of an open tokenizer, and the extra bytes while its file is parsed."""

    held: Count
    reading: Count


def measure(folder: Path) -> TokenizerMemory | None:
    """Measure the tokenizer in a model's folder; None if there is none or this OS does not report memory.

    The result is rounded to two significant digits in MiB and measured once per machine, for reproducible exports.
    """
    path = folder / TOKENIZER
    if not path.is_file() or not memory_sizes(_STATUS):
        return None
    key = hashlib.sha256(f"{file_sha256(path)} {versions_of(('tokenizers',))}".encode()).hexdigest()
    known = read_fact(key, _FACT, TokenizerMemory)
    if known is not None:
        return known
    command = [sys.executable, "-m", "edgekit.artifact.tokenizer_memory", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        held, reading = (_rounded(value) for value in json.loads(done.stdout))
        known = TokenizerMemory(held=held, reading=reading)
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        log.warning("the memory of %s was not measured: %s", path, error)
        return None
    write_fact(key, _FACT, known)
    return known


def _rounded(size: int) -> int:
    return round(float(f"{size / MIB:.2g}") * MIB)


def with_tokenizer(plan: Plan, folder: Path) -> Plan:
    """Return the plan with measured instead of predicted tokenizer memory."""
    measured = measure(folder)
    if measured is None:
        return plan
    facts = plan.memory.model_copy(
        update={"tokenizer_bytes": measured.held, "tokenizer_reading_bytes": measured.reading}
    )
    return with_facts(plan, facts)


def _main(path: Path) -> None:
    import tokenizers  # noqa: F401 - before the first reading, which leaves out the library

    return_unused()
    before = memory_sizes(_STATUS)
    tokenizer = read_tokenizer(path)
    tokenizer.get_added_tokens_decoder()
    highest = memory_sizes(_STATUS)
    return_unused()
    after = memory_sizes(_STATUS)
    assert before and highest and after
    held = max(0, after["RssAnon"] - before["RssAnon"])
    mapped = after["RssFile"] - before["RssFile"]  # the library's pages: part of VmHWM, but not private
    sys.stdout.write(json.dumps([held, max(0, highest["VmHWM"] - before["VmRSS"] - mapped - held)]))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
