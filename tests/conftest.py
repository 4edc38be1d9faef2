"""What every process of the suite needs."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from edgekit_onnx import prepacking
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from edgekit.common import machine_speed
from edgekit.common.machine_speed import MachineSpeed
from edgekit.common.packages import UNREPORTED

# The same examples at every run, so that a change is judged by what it changed; `make fuzz` looks for new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("random")
settings.load_profile("same")
IN_CHILDREN = {(prepacking, "_child"): prepacking._child, (machine_speed, "_in_a_child"): machine_speed._in_a_child}
LONGEST = (
    "/targets/", "/real/", "/native/", "test_lab_", "test_composition", "test_sealed_heads", "test_self_check",
    "test_tutorial", "test_pages_of_code", "test_damaged_files", "test_bench", "test_write_a_target", "test_demo",
    "test_sites_at_once", "test_sound_models",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Turn off vendors' telemetry; restore ctrl-C, which shells ignore for background processes."""
    if config.getoption("--hypothesis-profile", None) != "random":
        # Hypothesis also draws literals of the imported modules, and which ones these are depends on the tests before.
        providers._get_local_constants = providers.Constants
    for name, value in UNREPORTED.items():  # before any test imports these vendors
        os.environ.setdefault(name, value)
    os.environ.setdefault("EDGEKIT_ENGINES", "profile")  # plans do not depend on earlier measurements
    # Every test with a home of its own would start Python for these, a second each.
    prepacking._child = lambda *_: None  # weights are packed in this process
    machine_speed._in_a_child = lambda cores, *_: MachineSpeed(read_gb_s=20.0, fp32_tflops=0.1, cores=cores)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact of the fake target, which is installed for the test."""
    from fake_artifacts import install, make_artifact

    install(tmp_path / "site", monkeypatch)
    return make_artifact(tmp_path / "artifact")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of data/long_tests.txt; begin with the files that take longest, so that no worker ends late."""
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (not any(part in item.nodeid for part in LONGEST), -counts[item.path], item.path))
    lines = (Path(__file__).parent / "data/long_tests.txt").read_text().splitlines()
    for item in items:
        if any(line in item.nodeid for line in lines if not line.startswith("#")):
            item.add_marker("long")


def pytest_collection_finish() -> None:
    """Leave what was imported out of later garbage collections, which would look through all of it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test its own cache and facts of the machine."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights be packed and this machine's speed be measured in separate processes, as outside of tests."""
    for (module, name), function in IN_CHILDREN.items():
        monkeypatch.setattr(module, name, function)


@pytest.fixture
def own_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let onnxruntime's own operators compute, of which exact mode needs its rule."""
    monkeypatch.setenv("EDGEKIT_KERNELS", "off")
