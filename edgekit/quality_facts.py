"""Measured quality, found again: facts that hold on every machine, keyed by model, recipe, target, backend and weights.

Weights are the same for every target, so a measurement on one target stands in for another until that has its own. One
recipe may have been filled in several ways (rounded, or calibrated on some text); a plan is made before that is known,
so it goes by the worst that was measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from edgekit.files import home, write_file
from edgekit.frozen import Frozen
from edgekit.plan import Quality
from edgekit.recipe import Recipe

_MAX_FACTS = 1000
_MAX_FACT_BYTES = 64 << 10


class QualityFact(Frozen):
    """What was measured of one artifact."""

    version: int = 1
    model: str
    config_sha256: str
    recipe: Recipe
    target: str
    backend: str
    weights_sha256: str
    artifact_sha256: str
    kl: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    same_top: Annotated[float, Field(ge=0, le=1)]
    tokens: Annotated[int, Field(ge=1)]
    text: str

    @property
    def name(self) -> str:
        """Under which a plan names it."""
        return f"quality:{self.target}-{self.backend}-{self.recipe.name}:{self.weights_sha256[:16]}"


class Found(NamedTuple):
    """A measured quality, and the fact that it comes from."""

    quality: Quality
    fact: str


class QualityFacts:
    """Everything that was measured of one model."""

    def __init__(self, facts: Mapping[tuple[str, str, str, str], QualityFact] | None = None) -> None:
        self._facts = dict(facts or {})

    def find(self, recipe: Recipe, target: str, backend: str) -> Found | None:
        """The measurement of this very target and backend, else one of the same weights elsewhere."""
        key = _recipe_key(recipe)
        same = [fact for place, fact in sorted(self._facts.items()) if place[0] == key]
        own = [fact for fact in same if (fact.target, fact.backend) == (target, backend)]
        if not same:
            return None
        worst = max(own or same, key=lambda fact: fact.kl)
        where = "" if own else f"; measured on {worst.target} {worst.backend}, the same weights"
        several = len({fact.weights_sha256 for fact in own or same})
        return Found(
            _quality(worst, where + (f"; the worst of {several} sets of weights" if several > 1 else "")), worst.name
        )


def keep(fact: QualityFact) -> bool:
    """Remember a fact; False where the store cannot be written."""
    place = _folder(fact.config_sha256, fact.model)
    name = f"{_recipe_key(fact.recipe)}-{fact.target}-{fact.backend}-{fact.weights_sha256[:16]}.json"
    try:
        write_file(place / name, fact.model_dump_json().encode())
    except Exception:
        return False
    return True


def known(config_sha256: str, model: str) -> QualityFacts:
    """What was measured of a model; nothing where nobody did."""
    found: dict[tuple[str, str, str, str], QualityFact] = {}
    folder = _folder(config_sha256, model)
    for path in sorted(folder.glob("*.json"))[:_MAX_FACTS] if folder.is_dir() else ():
        try:
            if path.stat().st_size > _MAX_FACT_BYTES:
                continue
            fact = QualityFact.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue  # a fact can always be measured again
        if (fact.config_sha256, fact.model) == (config_sha256, model):
            found[_recipe_key(fact.recipe), fact.target, fact.backend, fact.weights_sha256] = fact
    return QualityFacts(found)


def _quality(fact: QualityFact, where: str) -> Quality:
    source = f"{fact.tokens:,} tokens of {fact.text} against the float model{where}"
    return Quality(kl=float(f"{fact.kl:.3g}"), same_top=round(fact.same_top, 4), basis="measured", source=source)


def _folder(config_sha256: str, model: str) -> Path:
    return home() / "quality" / hashlib.sha256(f"{config_sha256} {model}".encode()).hexdigest()[:32]


def _recipe_key(recipe: Recipe) -> str:
    """The same for the same rules, whatever they are called."""
    rules = recipe.model_copy(update={"name": ""}).model_dump_json()
    return hashlib.sha256(rules.encode()).hexdigest()[:16]
