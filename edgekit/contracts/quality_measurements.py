"""The store of measured quality: facts that hold on every machine, keyed by model, recipe, target, backend and weights.

Weights are the same for every target, so a measurement on one target is used for another until that has its own. A
recipe can have several measurements (rounded, or calibrated on some text). A plan does not know yet which of them
will apply, so it uses the worst.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from edgekit.common.base import Frozen
from edgekit.common.bounds import Amount, Sha256, Share, Text, Tokens, Version, Word
from edgekit.common.files import home, write_file
from edgekit.contracts.plan import Quality
from edgekit.contracts.recipe import Recipe

_MAX_FACTS = 1000
_MAX_FACT_BYTES = 64 << 10


class QualityFact(Frozen):
    """The measured quality of one artifact."""

    version: Version = 1
    model: Text
    config_sha256: Sha256
    recipe: Recipe
    target: Word
    backend: Word
    weights_sha256: Sha256
    artifact_sha256: Sha256
    kl: Amount  # mean divergence from the float model, nats per token
    same_top: Share  # share of tokens on which both models rank the same token first
    tokens: Tokens
    text: Text

    @property
    def name(self) -> str:
        """The name by which plans refer to this fact."""
        return f"quality:{self.target}-{self.backend}-{self.recipe.name}:{self.weights_sha256[:16]}"


class MeasuredQuality(NamedTuple):
    """A measured quality, and the name of the fact behind it."""

    quality: Quality
    fact: str


class QualityFacts:
    """All measured quality of one model."""

    def __init__(self, facts: Mapping[tuple[str, str, str, str], QualityFact] | None = None) -> None:
        self._facts = dict(facts or {})

    def find(self, recipe: Recipe, target: str, backend: str) -> MeasuredQuality | None:
        """Return the worst measurement on this target and backend, else on any other; None if there is none."""
        key = _recipe_key(recipe)
        same = [fact for place, fact in sorted(self._facts.items()) if place[0] == key]
        own = [fact for fact in same if (fact.target, fact.backend) == (target, backend)]
        if not same:
            return None
        worst = max(own or same, key=lambda fact: fact.kl)
        where = "" if own else f"; measured on {worst.target} {worst.backend}, the same weights"
        several = len({fact.weights_sha256 for fact in own or same})
        return MeasuredQuality(
            _quality(worst, where + (f"; the worst of {several} sets of weights" if several > 1 else "")), worst.name
        )


def write_quality_fact(fact: QualityFact) -> bool:
    """Store a fact. Returns False if the store cannot be written."""
    place = _folder(fact.config_sha256, fact.model)
    name = f"{_recipe_key(fact.recipe)}-{fact.target}-{fact.backend}-{fact.weights_sha256[:16]}.json"
    try:
        write_file(place / name, fact.model_dump_json().encode())
    except Exception:
        return False
    return True


def read_quality_facts(config_sha256: str, model: str) -> QualityFacts:
    """Read all facts of a model, skipping unreadable ones."""
    facts: dict[tuple[str, str, str, str], QualityFact] = {}
    folder = _folder(config_sha256, model)
    for path in sorted(folder.glob("*.json"))[:_MAX_FACTS] if folder.is_dir() else ():
        try:
            if path.stat().st_size > _MAX_FACT_BYTES:
                continue
            fact = QualityFact.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue  # a fact can always be measured again
        if (fact.config_sha256, fact.model) == (config_sha256, model):
            facts[_recipe_key(fact.recipe), fact.target, fact.backend, fact.weights_sha256] = fact
    return QualityFacts(facts)


def _quality(fact: QualityFact, where: str) -> Quality:
    source = f"{fact.tokens:,} tokens of {fact.text} against the float model{where}"
    return Quality(kl=float(f"{fact.kl:.3g}"), same_top=round(fact.same_top, 4), basis="measured", source=source)


def _folder(config_sha256: str, model: str) -> Path:
    return home() / "quality" / hashlib.sha256(f"{config_sha256} {model}".encode()).hexdigest()[:32]


def _recipe_key(recipe: Recipe) -> str:
    """Return a key that depends on the rules of a recipe and not on its name."""
    rules = recipe.model_copy(update={"name": ""}).model_dump_json()
    return hashlib.sha256(rules.encode()).hexdigest()[:16]
