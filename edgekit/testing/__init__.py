"""Public fakes and conformance suites, for our own tests and for everybody who writes a target."""

from __future__ import annotations

from edgekit.testing.check_engine import CHECKS, check_engine
from edgekit.testing.engine import FakeEngine, FakeSegment, FakeState

__all__ = ["CHECKS", "FakeEngine", "FakeSegment", "FakeState", "check_engine"]
