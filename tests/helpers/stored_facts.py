"""Every kind of fact and mark that edgekit keeps about this machine, for the fuzzer.

A kind is a function that makes what a use needs in a folder and returns the use: the first one writes the fact, later
ones read it. What they would measure or check is constant here, so that a mark must come out as it was.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fuzzing
import tiny_models
from edgekit_onnx.audit import audit
from measured import fake

from edgekit.apps.bench.machine import Machine
from edgekit.apps.delivery import signing
from edgekit.artifact.artifact import open_artifact
from edgekit.common import machine_speed
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.contracts.recipe import named_recipe
from edgekit.enginekit import exactness
from edgekit.model.source import open_source
from edgekit.quant import pipeline
from edgekit.runtime.speculation import costs
from edgekit.testing import FakeEngine, install_fake_target

Use = Callable[[], Any]
_KEY = "0" * 64


def _forward_cost(_: Path) -> Use:
    engine, config = FakeEngine(vocabulary=300), KVCacheConfig(capacity_tokens=64, kv_bits=16)

    def use() -> None:
        with patch.object(costs, "by_turns", lambda trials: {size: 1.0 + size / 8 for size in trials}):
            cost = costs.known_costs(engine, config, _KEY)
        assert all(math.isfinite(ratio) and ratio > 0 for ratio in cost.ratios().values())

    return use


def _share(_: Path) -> Use:
    probe = costs.CostProbe(FakeEngine(vocabulary=300), KVCacheConfig(capacity_tokens=64, kv_bits=16))

    def use() -> None:
        with patch.object(costs, "by_turns", lambda trials: {size: 1.0 + size / 8 for size in trials}):
            assert 0 < costs.known_share("share", _KEY, probe, probe) < math.inf

    return use


def _speed(_: Path) -> Use:
    measured = machine_speed.MachineSpeed(read_gb_s=5.0, fp32_tflops=0.05, cores=2)

    def use() -> None:
        with patch.object(machine_speed, "_in_a_child", lambda *_: measured):
            speed = machine_speed.machine_speed(2, 1 << 20, 1 << 30)
        assert 0 < speed.read_gb_s < 1e6 and 0 < speed.fp32_tflops < 1e6 and speed.cores == 2

    return use


def _canary(_: Path) -> Use:
    def use() -> None:
        with patch.object(Machine, "_canary", lambda _: 0.01):
            machine = Machine()
            machine.remember()
        assert 0 < machine.best_s <= 0.01

    return use


def _exact(_: Path) -> Use:
    engine, config = FakeEngine(vocabulary=300), KVCacheConfig(capacity_tokens=64, kv_bits=16)

    def use() -> None:
        with patch.object(exactness, "holds_here", lambda *_: True):
            exactness.check_once(
                engine, config, engine.start, key=_KEY, name="exact", versions={"threads": 2}, refusal="differs"
            )

    return use


def _artifact(folder: Path) -> Path:
    install_fake_target(folder / "site")
    if str(folder / "site") not in sys.path:
        sys.path.insert(0, str(folder / "site"))
    return fake(folder / "a.edgekit")[0]


def _verified(folder: Path) -> Use:
    place = _artifact(folder)
    return lambda: open_artifact(place)


def _signature(folder: Path) -> Use:
    artifact, key = open_artifact(_artifact(folder)), folder / "key.pem"
    key.write_text("-----BEGIN PUBLIC KEY-----")
    (artifact.folder / signing.SIGNATURE).write_text("{}")

    def use() -> None:
        with patch.object(signing, "check_signature", lambda *_: "someone"):
            signing.check_required_signature(artifact, key)

    return use


def _weights(folder: Path) -> Use:
    model = tiny_models.write_tiny(folder / "tiny", layers=1)
    made = pipeline.neutral_weights(open_source(model, need_weights=True), named_recipe("s4-g32"))
    return lambda: pipeline._check(_KEY, made.folder)


def _audited(folder: Path) -> Use:
    made = open_artifact(
        tiny_models.artifact_of(tiny_models.write_tiny(folder / "tiny", layers=1), folder / "a.edgekit")
    )
    files = next(made.folder.rglob("*.onnx")).parent
    return lambda: audit(made.plan, files)


MEASURED: dict[str, Callable[[Path], Use]] = {
    "forward-cost": _forward_cost, "share": _share, "speed": _speed, "canary": _canary, "audited": _audited,
}  # fmt: skip
MARKS: dict[str, Callable[[Path], Use]] = {
    "exact": _exact, "verified": _verified, "signature": _signature, "weights": _weights,
}  # fmt: skip
KINDS = MEASURED | MARKS


class Facts(fuzzing.JsonFormat):
    """One kind of fact or mark: a damaged one is made again, never trusted and never an error."""

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__()
        home = folder / "home"
        os.environ["EDGEKIT_HOME"] = str(home)
        self._use = KINDS[kind](folder)
        shutil.rmtree(home / "facts", ignore_errors=True)  # what an export wrote
        self._use()
        for path in home.glob("facts/**/*.json"):
            self.add(path)
        assert len(self.wholes) == 1, [*self.wholes]
        self._is_mark = kind in MARKS

    def read(self, path: Path) -> None:
        self._use()
        assert not self._is_mark or path.read_bytes() == self.wholes[path]
