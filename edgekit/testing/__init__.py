"""Public fakes and conformance suites, for edgekit's own tests and for authors of targets."""

from __future__ import annotations

from edgekit.testing.adapters import write_adapter
from edgekit.testing.check_engine import CHECKS, check_engine
from edgekit.testing.check_target import check_export, check_target, check_weights
from edgekit.testing.drafting import FixedLengthDrafting, ReplayDrafter
from edgekit.testing.engine import FakeEngine, FakeState
from edgekit.testing.plan import fake_model, fake_plan
from edgekit.testing.target import FakeTarget, fake_artifact, install_fake_target

__all__ = [
    "CHECKS",
    "FakeEngine",
    "FakeState",
    "FakeTarget",
    "FixedLengthDrafting",
    "ReplayDrafter",
    "check_engine",
    "check_export",
    "check_target",
    "check_weights",
    "fake_artifact",
    "fake_model",
    "fake_plan",
    "install_fake_target",
    "write_adapter",
]
