"""Speed of the installed engines on this machine, measured once on small random models and stored.

The overhead between operators limits small models, reading weights limits large ones. Each size class therefore has
its own random model with few layers. Engines run in separate processes and take turns.
`EDGEKIT_ENGINES=profile` turns the measurement off; plans then keep the order of the device's profile.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.common import machine_facts as facts
from edgekit.common.base import Frozen
from edgekit.common.bounds import MachineNumber, Word
from edgekit.common.cores import cores_allowed
from edgekit.common.environment import environment_choice
from edgekit.common.log import log
from edgekit.common.packages import version_of, versions_of
from edgekit.common.subprocesses import PipedProcess
from edgekit.contracts.recipe import named_recipe
from edgekit.enginekit.spinning import spin_us
from edgekit.model.families import model_from_config
from edgekit.model.spec import ModelSpec

RECIPE, PROMPT, DECODED, CONTEXT = "s4-g32", 128, 24, 512
_SUBJECT, _ROUNDS, _LIMIT_S, _ANSWER_BYTES = "this-machine", 5, 120.0, 1024
_VENDORS = ("onnxruntime", "onnxruntime-gpu", "mlx", "xllamacpp", "executorch")


class SizeClass(NamedTuple):
    """Models of up to `parameters` parameters, and the shape of the random model that represents them."""

    name: str
    parameters: float
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int


SIZE_CLASSES = (
    SizeClass("small", 0.3e9, 576, 1536, 9, 3, 12, 8192),
    SizeClass("half-billion", 0.8e9, 896, 4864, 14, 2, 5, 16_384),
    SizeClass("billion", float("inf"), 2048, 8192, 32, 8, 2, 16_384),
)


class EngineSpeed(NamedTuple):
    """The times of one engine on the random model of a size class."""

    prompt_s: float  # of a prompt of PROMPT tokens
    step_s: float  # of one decoded token after it


class StoredSpeeds(Frozen):
    """The fact of the engines' speeds for a size class."""

    key: Word  # of what they depend on
    speeds: dict[Word, tuple[MachineNumber, MachineNumber]]  # as in `EngineSpeed`, by target


def class_of(model: ModelSpec) -> SizeClass:
    """Return the size class of a model."""
    return next(size for size in SIZE_CLASSES if model.parameters <= size.parameters)


@cache
def random_model(size: SizeClass) -> ModelSpec:
    """Return the random model of a size class."""
    return model_from_config(config_of(size), f"random-{size.name}", "config.json")


def config_of(size: SizeClass) -> dict[str, Any]:
    """Return that model's configuration, as its family writes it."""
    return {
        "model_type": "llama", "hidden_size": size.hidden, "intermediate_size": size.inner,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads,
        "head_dim": 64, "vocab_size": size.vocabulary, "max_position_embeddings": 2 * CONTEXT,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10_000.0,
    }  # fmt: skip


def engine_speeds(
    model: ModelSpec,
    targets: Sequence[str],
    *,
    threads: int,
    announce: Callable[[str], None] = log.info,
    may_measure: bool = True,
) -> Mapping[str, EngineSpeed]:
    """Return the speeds of `targets` for models of this size; measure them if none are stored for these versions.

    Empty if there are fewer than two targets, or if nothing is stored and the machine is too busy or `may_measure` is
    False.
    """
    if len(targets) < 2 or not measures():
        return {}
    size, key = class_of(model), _key(targets, threads)
    name = f"engines-{size.name}"
    stored = facts.read_fact(_SUBJECT, name, StoredSpeeds)
    if stored is not None and stored.key == key:
        return {target: EngineSpeed(*times) for target, times in stored.speeds.items()}
    if not may_measure:
        return {}
    names = " and ".join(targets)
    if is_busy():
        announce(f"this machine is too busy to time {names}; the order in its profile is used for now")
        return {}
    announce(f"timing {names} on this machine with random weights, once for models of this size")
    known = _measure(size, targets, threads)
    facts.write_fact(
        _SUBJECT, name, StoredSpeeds(key=key, speeds={target: (*speed,) for target, speed in known.items()})
    )
    return known


def is_busy() -> bool:
    """Return True if over half of the cores were busy in the last minute."""
    cores = cores_allowed()
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > max(1.0, cores / 2)


def measures() -> bool:
    """Return False if `EDGEKIT_ENGINES=profile`."""
    return environment_choice("EDGEKIT_ENGINES", "measured", "profile") != "profile"


def _key(targets: Sequence[str], threads: int) -> str:
    """Hash everything that influences these speeds."""
    what = [version_of("edgekit"), versions_of(_VENDORS), sorted(targets), threads, spin_us(), PROMPT, DECODED]
    return hashlib.sha256(json.dumps([what, SIZE_CLASSES], sort_keys=True).encode()).hexdigest()[:16]


def _measure(size: SizeClass, targets: Sequence[str], threads: int) -> dict[str, EngineSpeed]:
    """Run the engines in turns and return the shortest times of each; a target that fails is left out."""
    from edgekit.quant.random_weights import random_weights

    with tempfile.TemporaryDirectory(prefix="edgekit-engines-") as temporary, ExitStack() as stack:
        weights = Path(temporary) / "weights"
        random_weights(weights, config_of(size), named_recipe(RECIPE), f"random-{size.name}")
        (weights / "config.json").write_text(json.dumps(config_of(size)))
        engines = {name: _started(name, weights, Path(temporary) / name, threads) for name in targets}
        for process in engines.values():
            stack.callback(process.close)
        rounds: dict[str, list[EngineSpeed]] = {name: [] for name in targets}
        for _ in range(_ROUNDS + 1):
            for name, process in engines.items():
                speed = _round(name, process)
                if speed is not None:
                    rounds[name].append(speed)
    whole = {name: each[1:] for name, each in rounds.items() if len(each) > _ROUNDS}  # the first one warms up
    return {
        name: EngineSpeed(min(speed.prompt_s for speed in each), min(speed.step_s for speed in each))
        for name, each in whole.items()
    }


def _started(target: str, weights: Path, out: Path, threads: int) -> PipedProcess:
    """Start a process that opens one engine, and runs a round for each message."""
    return PipedProcess(
        [sys.executable, "-m", "edgekit.device.engine_trial", target, str(weights), str(out), str(threads)]
    )


def _round(target: str, process: PipedProcess) -> EngineSpeed | None:
    """Prefill and decode once; None if the engine failed."""
    try:
        return EngineSpeed(**process.request({}, limit_s=_LIMIT_S, limit_bytes=_ANSWER_BYTES))
    except (EOFError, TypeError):
        log.info("%s could not be measured", target)
        return None
