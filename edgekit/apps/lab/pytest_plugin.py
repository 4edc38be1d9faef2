"""A pytest plugin for on-device tests: a mark names a device of the lab file, a fixture measures on it.

    @pytest.mark.edgekit_device("pixel-9")
    def test_first_token(device): assert device.measure("artifact", "chat").cases[0].summary[...]

pytest loads this module in every test run of an environment with edgekit, so it imports only pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from edgekit.apps.bench import Measurement
    from edgekit.apps.lab.devices import LabDevice

_OPTION, _MARK = "--edgekit-lab", "edgekit_device"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("edgekit")
    group.addoption(_OPTION, type=Path, help="The lab's file, whose devices tests marked `edgekit_device` are run on.")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{_MARK}(name): run on that device of the lab's file, given by {_OPTION}")


class HeldDevice:
    """A device held exclusively by the test."""

    def __init__(self, device: LabDevice) -> None:
        self.device, self.name, self.profile = device, device.name, device.profile

    def measure(self, artifact: str | Path, workload: str | Path = "quick", *, timeout_s: float = 900.0) -> Measurement:
        """Measure the workload on the device."""
        return self.device.measure(Path(artifact), Path(workload), timeout_s=timeout_s)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[HeldDevice]:
    """Acquire the device of the test's mark during the test; skip the test without a lab file."""
    mark: Any = request.node.get_closest_marker(_MARK)
    if mark is None or len(mark.args) != 1:
        pytest.fail(f'mark the test with @pytest.mark.{_MARK}("NAME"): the fixture `device` needs to know which')
    file: Path | None = request.config.getoption(_OPTION)
    if file is None:
        pytest.skip(f"no lab is given; run with {_OPTION} lab.yaml")
    from edgekit.apps.lab.devices import connect
    from edgekit.apps.lab.matrix import read_lab

    lab = read_lab(file)
    spec = next((spec for spec in lab.devices if spec.name == mark.args[0]), None)
    if spec is None:
        pytest.fail(f"{file}: no device {mark.args[0]!r}; it has {', '.join(spec.name for spec in lab.devices)}")
    connected = connect(spec, [Path(folder) for folder in lab.profiles])
    with connected.acquire(timeout_s=900.0):
        yield HeldDevice(connected)
