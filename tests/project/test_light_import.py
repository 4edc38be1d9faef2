"""`import edgekit` is quick and loads no heavy library, and neither does planning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "torch",
    "transformers",
    "onnxruntime",
    "onnx",
    "onnx_ir",
    "mlx",
    "mlx_lm",
    "executorch",
    "xllamacpp",
    "torchao",
    "optimum",
    "scipy",
}

_PROBE = """
import json, sys, time
start = time.process_time()
{code}
spent = time.process_time() - start
print(json.dumps([spent, sorted({{name.partition('.')[0] for name in sys.modules}})]))
"""


def probe(code: str, cwd: Path) -> tuple[float, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE.format(code=code)], capture_output=True, text=True, check=True, cwd=cwd
    )
    spent, modules = json.loads(done.stdout.splitlines()[-1])
    return spent, set(modules)


def test_importing_edgekit_is_quick_and_loads_nothing_heavy(tmp_path: Path) -> None:
    runs = [probe("import edgekit", tmp_path) for _ in range(3)]
    assert not runs[0][1] & (HEAVY | {"numpy", "rich", "click"})
    assert min(spent for spent, _ in runs) < 0.15


@pytest.mark.parametrize("name", ["onnx", "mlx", "llamacpp", "executorch"])
def test_loading_a_target_loads_no_vendor_library(name: str, tmp_path: Path) -> None:
    _, modules = probe(f"from edgekit.plugins import load_target; load_target({name!r}).missing()", tmp_path)
    assert not modules & HEAVY


def test_planning_loads_no_vendor_library(tmp_path: Path) -> None:
    code = "from edgekit.planner.make import make_plans; make_plans('demo', ['pixel-9', 'macbook-m4-16gb'])"
    _, modules = probe(code, tmp_path)
    assert not modules & HEAVY
