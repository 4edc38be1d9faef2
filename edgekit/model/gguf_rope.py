"""Converts the rope keys and factor tensors of a GGUF file to Hugging Face's `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgekit.errors import InvalidInput
from edgekit.model.gguf_keys import ArchitectureKeys


def read_rope_scaling(
    keys: ArchitectureKeys, config: Mapping[str, Any], present: Sequence[str], read: Callable[[str], Sequence[float]]
) -> dict[str, Any] | None:
    """Return Hugging Face's `rope_scaling`; None for a plain rope.

    `config` is the part of the config read so far, `present` the names of the tensors with factors; `read` returns
    the values of one.
    """
    family = config["model_type"]
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    # llama.cpp takes a factor without a type as linear.
    kind = keys.text("rope.scaling.type", "linear" if factor else "none")
    attention = keys.number("rope.scaling.attn_factor", keys.number("rope.scaling.yarn_attn_factor", 1.0))
    if family == "phi3" and present:
        return _longrope(keys, config, read, present, attention)
    if "rope_freqs.weight" in present:
        if kind not in ("none", "linear") or factor not in (0.0, 1.0) or attention != 1.0:
            raise keys.unsupported("rope.scaling.type", "occurs next to rope_freqs.weight, which is not supported")
        return _from_factors(keys, config, [float(item) for item in read("rope_freqs.weight")])
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        if attention != 1.0:
            raise keys.unsupported("rope.scaling.attn_factor", "scales attention without a stretched rope")
        return None
    if kind == "linear" and attention == 1.0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and family != "gemma3_text":
        return _yarn(keys, factor, attention)
    raise keys.unsupported("rope.scaling.type", "is not supported here")


def _longrope(
    keys: ArchitectureKeys,
    config: Mapping[str, Any],
    read: Callable[[str], Sequence[float]],
    present: Sequence[str],
    attention: float,
) -> dict[str, Any]:
    if len(present) != 2 or "original_max_position_embeddings" not in config:
        raise InvalidInput(
            f"{keys.where}: a long rope needs rope_factors_long, rope_factors_short and "
            "rope.scaling.original_context_length; is the file complete?"
        )
    long, short = (
        [float(item) for item in read(name)] for name in ("rope_factors_long.weight", "rope_factors_short.weight")
    )
    return {"rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": attention}


def _yarn(keys: ArchitectureKeys, factor: float, attention: float) -> dict[str, Any]:
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise keys.unsupported("rope.scaling.yarn_ext_factor", "is not 1, which is not supported")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }
    if attention != 1.0:
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    for name in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = keys.number(f"rope.scaling.yarn_{name}", 0.0)
    return scaling


def _from_factors(keys: ArchitectureKeys, config: Mapping[str, Any], factors: Sequence[float]) -> dict[str, Any]:
    """Return a llama3 rope if it explains the factors, otherwise a longrope with these factors."""
    half = config["head_dim"] // 2
    if len(factors) != half or not all(math.isfinite(item) and item > 0 for item in factors):
        raise InvalidInput(f"{keys.where}: rope_freqs.weight does not hold {half} factors; is the file complete?")
    llama3: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": _round(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_factors(config["rope_theta"], config["head_dim"], llama3)
    if all(abs(one - other) <= 1e-5 * other for one, other in zip(factors, expected, strict=True)):
        return llama3
    return {
        "rope_type": "longrope",
        "short_factor": list(factors),
        "long_factor": list(factors),
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _round(factor: float) -> float:
    """Undo the rounding error of float32 arithmetic: 32 for 32.000004."""
    return float(round(factor)) if abs(factor - round(factor)) < 1e-4 else factor


def _llama3_factors(theta: float, dim: int, rope: Mapping[str, Any]) -> list[float]:
    factors = []
    for index in range(0, dim, 2):
        turns = rope["original_max_position_embeddings"] * theta ** (-index / dim) / (2 * math.pi)
        blend = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        blend = min(1.0, max(0.0, blend))
        factors.append(1 / ((1 - blend) / rope["factor"] + blend))
    return factors
