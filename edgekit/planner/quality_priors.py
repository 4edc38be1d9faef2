"""Priors: the quality loss expected of a recipe until it is measured for a model, with sources.

Small models lose more than large ones. A model that is near a measured one in size gets that one's figures as its
prior, and the other recipes' in proportion, so that they compare. A measurement of the model itself replaces the prior.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import NamedTuple

from edgekit.contracts.plan import Quality
from edgekit.contracts.recipe import Recipe

_LLAMA_CPP = "Llama-3-8B on wikitext-2, llama.cpp tools/perplexity README"
_GROUPS = f"{_LLAMA_CPP}: Q4_K_M, the nearest calibrated 4-bit format"
_SCALED = f"{_GROUPS}; scaled by the ratio of calibrated group sizes on a small model"

# Mean KL divergence and share of equal top tokens. Where KL was scaled by r, the share of changed tokens was by √r.
PRIORS: dict[str, Quality] = {
    "float32": Quality(kl=0.0, same_top=1.0, basis="prior", source="nothing is rounded"),
    "float16": Quality(kl=0.00001, same_top=0.999, basis="prior", source="rounding to 11 bits, derived"),
    "s8": Quality(kl=0.0014, same_top=0.977, basis="prior", source=f"{_LLAMA_CPP}: Q8_0"),
    "mixed-4.5": Quality(kl=0.0344, same_top=0.915, basis="prior", source=f"{_SCALED}: 1.1"),
    "balanced": Quality(kl=0.0265, same_top=0.925, basis="prior", source=f"{_SCALED}: 5.5/6.5"),
    "s4-g32": Quality(kl=0.0313, same_top=0.919, basis="prior", source=_GROUPS),
    "s4-g64": Quality(kl=0.0402, same_top=0.908, basis="prior", source=f"{_SCALED}: 9/7"),
    "s4-g128": Quality(kl=0.0492, same_top=0.898, basis="prior", source=f"{_SCALED}: 11/7"),
    "mxfp4": Quality(kl=0.0916, same_top=0.861, basis="prior", source=f"{_SCALED}: not calibrated, 67/42 of Q4_0"),
    "nvfp4": Quality(kl=0.0668, same_top=0.882, basis="prior", source=f"{_SCALED}: not calibrated, 39/42 of Q4_0"),
    "affine3": Quality(kl=0.25, same_top=0.77, basis="prior", source="not calibrated, recalled from 3-bit formats"),
    "affine5": Quality(kl=0.0108, same_top=0.952, basis="prior", source=f"{_LLAMA_CPP}: Q5_K_M"),
    "affine6": Quality(kl=0.0055, same_top=0.96, basis="prior", source=f"{_LLAMA_CPP}: Q6_K"),
}


class MeasuredModel(NamedTuple):
    """The loss of a calibrated recipe on held-out code, prose and chats (examples/benchmarks/results/quality.json)."""

    name: str
    parameters: int
    kl: tuple[float, float, float]
    same_top: tuple[float, float, float]


_MEASURED_RECIPE = "balanced"
MEASURED: dict[str, tuple[MeasuredModel, ...]] = {
    _MEASURED_RECIPE: (
        MeasuredModel("demo", 11_015_040, (0.0046, 0.0065, 0.0063), (0.9575, 0.9624, 0.9458)),
        MeasuredModel("SmolLM2-135M-Instruct.Q4_1", 134_515_008, (0.0412, 0.0529, 0.0623), (0.896, 0.8955, 0.8501)),
        MeasuredModel("gemma-3-270m-Q4_K_M", 268_098_176, (0.0403, 0.0431, 0.0542), (0.8843, 0.8848, 0.8525)),
    ),
}
_SAME_SIZE = 4.0  # most ratio of parameter counts at which figures carry over
_KEPT = Quality(kl=0.0, same_top=1.0, basis="prior", source="against the source, whose own integers are kept")
_UNKNOWN = Quality(kl=0.1, same_top=0.86, basis="prior", source="an unknown recipe: as 4 bits uncalibrated")


def prior(recipe: Recipe, parameters: int) -> Quality:
    """Return a recipe's prior for a model with `parameters`; for a custom recipe, the prior of its coarsest rule."""
    if recipe.keeps is not None:
        is_rounded = any(rule.format.kind == "s8" and rule.format.scales is None for rule in recipe.rules)
        return PRIORS["s8"] if is_rounded else _KEPT
    near = min(MEASURED[_MEASURED_RECIPE], key=lambda each: _distance(each, parameters))
    is_near = _distance(near, parameters) <= math.log(_SAME_SIZE)
    if is_near and recipe.plain_name == _MEASURED_RECIPE:
        return _as_measured(near)
    named = [PRIORS.get(str(rule.format), _UNKNOWN) for rule in recipe.rules]
    usual = PRIORS.get(recipe.plain_name) or max(named, key=lambda quality: quality.kl, default=PRIORS["float16"])
    return _in_proportion(usual, near) if is_near and usual.kl > PRIORS["float16"].kl else usual


def _in_proportion(usual: Quality, near: MeasuredModel) -> Quality:
    """Scale a prior by how much more or less than its own prior the measured recipe lost on a model of this size."""
    measured, expected = _as_measured(near), PRIORS[_MEASURED_RECIPE]
    changed = (1 - usual.same_top) * (1 - measured.same_top) / (1 - expected.same_top)
    return usual.model_copy(
        update={
            "kl": float(f"{usual.kl * measured.kl / expected.kl:.3g}"),
            "same_top": round(max(0.0, 1 - changed), 3),
            "source": f"{usual.source}; scaled as {_MEASURED_RECIPE} on {near.name}",
        }
    )


def _distance(measured: MeasuredModel, parameters: int) -> float:
    return abs(math.log(measured.parameters / parameters))


def _as_measured(near: MeasuredModel) -> Quality:
    by_kind = ", ".join(f"{kl:.4f} on {kind}" for kind, kl in zip(("code", "prose", "chats"), near.kl, strict=True))
    return Quality(
        kl=float(f"{fmean(near.kl):.3g}"),
        same_top=round(fmean(near.same_top), 3),
        basis="prior",
        source=f"measured on {near.name}, calibrated: KL {by_kind}",
    )
