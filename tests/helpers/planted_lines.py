"""Plant one wrong line at a time and see whether the tests notice: `python tests/helpers/planted_lines.py`.

A fault counts as caught if a test of `make test` in the named places fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import click

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "dist", ".*_cache", ".hypothesis")


class Fault(NamedTuple):
    """A wrong line, and where a test should notice it."""

    file: str
    right: str  # found once in the file
    wrong: str
    tests: str


FAULTS = (
    # scheduler and runtime
    Fault("edgekit/contracts/kv_policy.py", "return Eviction(self.sinks, self.sinks + self.block)",
          "return Eviction(0, self.block)", "tests/runtime/test_windows.py"),
    Fault("edgekit/contracts/kv_policy.py", "max(0, self.window - length)", "max(0, self.window - length + 1)",
          "tests/runtime/test_windows.py tests/runtime/test_scheduling.py"),
    Fault("edgekit/contracts/kv_policy.py", "least = sorted(range(spans), key=totals.__getitem__)",
          "least = sorted(range(spans), key=totals.__getitem__, reverse=True)", "tests/runtime/test_scored_windows.py"),
    Fault("edgekit/runtime/request.py", "            self.state.rewind(len(proposal) - accepted)",
          "            self.state.rewind(len(proposal) - accepted - 1)", "tests/runtime/test_speculation.py"),
    Fault("edgekit/runtime/request.py", "is_right = index < len(proposal) and token == proposal[index]",
          "is_right = index < len(proposal)", "tests/runtime/test_speculation.py"),
    Fault("edgekit/runtime/scheduler.py", "while self._waiting and len(self._running) < self._max_running:",
          "while self._waiting:", "tests/runtime/test_scheduling.py tests/runtime/test_loop.py"),
    Fault("edgekit/runtime/scheduler.py", "running = [request for request in self._running if not request.is_done]",
          "running: list[Request] = []", "tests/runtime/test_planted_faults.py tests/runtime/test_loop.py"),
    Fault("edgekit/runtime/generation/sampling.py", "np.where(values > 0, values / penalty, values * penalty)",
          "np.where(values > 0, values * penalty, values / penalty)", "tests/runtime/test_sampling.py"),
    Fault("edgekit/runtime/generation/sampling.py", "place = gumbel_argmax(kept, ids, self.seed, position,",
          "place = gumbel_argmax(kept, None, self.seed, position,",
          "tests/runtime/test_sampling.py tests/runtime/test_exact_sampling.py"),
    Fault("edgekit/runtime/generation/tokenizer.py", "if size > limit and most is not None:",
          "if size > limit << 10 and most is not None:", "tests/runtime/test_large_texts.py"),
    Fault("edgekit/runtime/prefix_cache/file.py", 'if header.get("artifact") != identity:',
          'if header.get("artifact") is None:', "tests/runtime/test_prefixes.py"),
    # engines
    Fault("targets/edgekit_onnx/state.py", "shift_kv(keys, run.place, run.start, run.stop, turn[layer])",
          "shift_kv(keys, run.place, run.start, run.stop, None)", "tests/targets/onnx"),
    Fault("targets/edgekit_mlx/state.py", "return self._origin + self.length", "return self.length",
          "tests/targets/mlx"),
    Fault("targets/edgekit_mlx/state.py", "array[:, self.length : self.length + saved.shape[1]] = mx.array(saved)",
          "array[:, : saved.shape[1]] = mx.array(saved)",
          "tests/targets/mlx tests/targets/test_conformance.py"),
    Fault("targets/edgekit_executorch/engine.py", "rows = range(count - max(num_logits, 1), count)",
          "rows = range(max(num_logits, 1))", "tests/targets/executorch"),
    Fault("targets/edgekit_llamacpp/engine.py", "state.context.give_back(state.sequence)", "pass",
          "tests/targets/llamacpp"),
    # formats and quantisation
    Fault("edgekit/quant/rtn.py", "    return -half, half - 1", "    return -half, half - 2", "tests/quant"),
    Fault("edgekit/quant/rtn.py", "values = values.bfloat16().float().clamp_(min=MIN_SCALE)",
          "values = values.half().float().clamp_(min=MIN_SCALE)", "tests/quant"),
    Fault("edgekit/formats/chunking.py", "start = places[-1].offset", "start = place.offset", "tests/formats"),
    Fault("edgekit/formats/int_packing.py", "np.right_shift(packed, 4,", "np.right_shift(packed, 5,", "tests/formats"),
    # planner and artifacts
    Fault("edgekit/contracts/memory.py", "size * self.sequences", "size", "tests/planner"),
    Fault("edgekit/planner/resolver.py", "if not candidate.violations:", "if candidate is not None:", "tests/planner"),
    Fault("edgekit/contracts/token_costs.py", "return min(tokens, layer.window or tokens) if self.bounds_windows",
          "return tokens if self.bounds_windows", "tests/planner"),
    Fault("edgekit/artifact/artifact.py", "if file_sha256(self.folder / name) != fact.sha256:",
          "if len(file_sha256(self.folder / name)) != len(fact.sha256):", "tests/artifact"),
    Fault("edgekit/artifact/artifact.py", "if path not in known:", "if path in known and path.is_dir():",
          "tests/artifact"),
    # server
    Fault("edgekit/apps/serve/admission.py", "            self._answers[model] -= count", "            pass",
          "tests/apps/serve"),
    Fault("edgekit/apps/serve/guard.py", '.lower() not in self._hosts', '.lower() == ""', "tests/apps/serve"),
    Fault("edgekit/apps/serve/keys.py", "        return found\n", "        return self._keys[0]\n", "tests/apps/serve"),
    # delivery
    Fault("edgekit/apps/delivery/site_index.py", "if not release.withdrawn and release.is_for(installation):",
          "if release.is_for(installation):", "tests/apps/delivery"),
    Fault("edgekit/apps/delivery/pull.py", "        _check_index_is_not_older(index, index_sha256, installed, site)",
          "        pass", "tests/apps/delivery"),
)  # fmt: skip


def caught(fault: Fault) -> str | None:
    """Return the first failing test of a copy of the tree with this fault; None: no test noticed."""
    with tempfile.TemporaryDirectory(prefix="edgekit-planted-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        path = tree / fault.file
        path.write_text(path.read_text().replace(fault.right, fault.wrong))
        paths = os.pathsep.join(map(str, (tree, tree / "targets")))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long", "-n", "2", *fault.tests.split()]
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    return next((line[:150] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), None)


def main() -> None:
    """Plant every fault and print what happened."""
    count = 0
    for fault in FAULTS:
        count += (noticed := caught(fault)) is not None
        click.echo(f"{'caught' if noticed else 'MISSED'}  {fault.file}: {fault.wrong.strip()}  {noticed or ''}")
    click.echo(f"{count} of {len(FAULTS)} caught")


if __name__ == "__main__":
    main()
