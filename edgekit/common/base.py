"""The base of all data models: frozen and strict; unknown fields are errors."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable data. Compose it; never subclass a subclass of it."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="null", defer_build=True
    )
