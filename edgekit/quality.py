"""What a recipe is expected to cost in quality before it was measured for a model: a prior, with its source.

Small models lose more and large ones less; a measurement replaces the prior as soon as there is one.
"""

from __future__ import annotations

from edgekit.plan import Quality
from edgekit.recipe import Recipe

_LLAMA_CPP = "Llama-3-8B on wikitext-2, llama.cpp tools/perplexity README"
_GROUPS = f"{_LLAMA_CPP}: Q4_K_M, the nearest calibrated 4-bit format"
_SCALED = f"{_GROUPS}; scaled by the ratio of calibrated group sizes on a small model"

# Mean KL divergence and share of equal top tokens. From a KL ratio r the share of changed tops is scaled by √r.
PRIORS: dict[str, Quality] = {
    "float32": Quality(kl=0.0, same_top=1.0, basis="prior", source="nothing is rounded"),
    "float16": Quality(kl=0.00001, same_top=0.999, basis="prior", source="rounding to 11 bits, derived"),
    "s8": Quality(kl=0.0014, same_top=0.977, basis="prior", source=f"{_LLAMA_CPP}: Q8_0"),
    "mixed-4.5": Quality(kl=0.0344, same_top=0.915, basis="prior", source=f"{_SCALED}: 1.1"),
    "s4-g32": Quality(kl=0.0313, same_top=0.919, basis="prior", source=_GROUPS),
    "s4-g64": Quality(kl=0.0402, same_top=0.908, basis="prior", source=f"{_SCALED}: 9/7"),
    "s4-g128": Quality(kl=0.0492, same_top=0.898, basis="prior", source=f"{_SCALED}: 11/7"),
    "mxfp4": Quality(kl=0.0916, same_top=0.861, basis="prior", source=f"{_SCALED}: not calibrated, 67/42 of Q4_0"),
    "nvfp4": Quality(kl=0.0668, same_top=0.882, basis="prior", source=f"{_SCALED}: not calibrated, 39/42 of Q4_0"),
    "affine3": Quality(kl=0.25, same_top=0.77, basis="prior", source="not calibrated, recalled from 3-bit formats"),
    "affine5": Quality(kl=0.0108, same_top=0.952, basis="prior", source=f"{_LLAMA_CPP}: Q5_K_M"),
    "affine6": Quality(kl=0.0055, same_top=0.96, basis="prior", source=f"{_LLAMA_CPP}: Q6_K"),
}
_UNKNOWN = Quality(
    kl=0.1, same_top=0.86, basis="prior", source="a recipe that nothing is known of: as 4 bits uncalibrated"
)


def prior(recipe: Recipe) -> Quality:
    """What is expected of a recipe; for one written by hand, what is expected of its coarsest rule."""
    if recipe.name in PRIORS:
        return PRIORS[recipe.name]
    named = [PRIORS.get(str(rule.format), _UNKNOWN) for rule in recipe.rules]
    return max(named, key=lambda quality: quality.kl, default=PRIORS["float16"])
