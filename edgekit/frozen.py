"""The one base of all data classes: frozen, strict, and refusing what it does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable data. Compose it; never inherit from a class that inherits from it."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="null"
    )
