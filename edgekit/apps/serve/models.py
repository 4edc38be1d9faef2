"""The models that a server offers, by the names that clients use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from edgekit import AsyncRuntime, ChatTemplate, Runtime, chat_sampling, read_template
from edgekit.apps.serve.pool import ModelPool, OnDemand, PooledModel, PoolSettings
from edgekit.apps.serve.problems import ApiError
from edgekit.errors import InvalidInput, quote_short

_LONGEST_NAME = 256


class ServedModel(NamedTuple):
    """A model under one of the names that clients use, with the adapter that the name stands for."""

    name: str
    model: PooledModel
    adapter: str | None = None

    @property
    def runtime(self) -> AsyncRuntime:
        """The open runtime. Valid only during a call that uses it."""
        assert self.model.runtime is not None, "the model is not in use"
        return self.model.runtime

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.model.context

    @property
    def writes_text(self) -> bool:
        """False for an encoder."""
        if self.model.runtime is not None:
            return self.model.runtime.runtime.engine.capabilities.generates
        return self.model.artifact is None or not self.model.artifact.plan.model.encoder

    @property
    def template(self) -> ChatTemplate:
        """The chat template, even while the model is not open."""
        if self.model.runtime is not None:
            return self.model.runtime.runtime.template
        assert self.model.artifact is not None
        return read_template(self.model.artifact.folder)

    @property
    def fingerprint(self) -> str:
        """A text that identifies the artifact."""
        artifact = self.model.artifact
        return f"fp_{artifact.sha256[:12]}" if artifact else "fp_unsealed"


class Models:
    """The served models by name, with aliases for names that are fixed in clients."""

    def __init__(
        self,
        models: Mapping[str, Runtime | AsyncRuntime | OnDemand],
        aliases: Mapping[str, str] | None = None,
        pool: PoolSettings | None = None,
    ) -> None:
        if not models:
            raise InvalidInput("no model to serve; give at least one")
        self._models = {name: PooledModel(name, each) for name, each in models.items()}
        self.pool = ModelPool(self._models.values(), pool)
        self._aliases = dict(aliases or {})
        self.created = int(time.time())
        for name, target in self._aliases.items():
            if target.partition(":")[0] not in self._models and target not in self._models:
                known = f"name one of {', '.join(self._models)}"
                raise InvalidInput(f"alias {quote_short(name)}: {quote_short(target)} is not served; {known}")
        self._defaults: dict[str, dict[str, Any]] = {}

    @property
    def runtimes(self) -> dict[str, AsyncRuntime]:
        """The open runtimes by name."""
        return {name: model.runtime for name, model in self._models.items() if model.runtime is not None}

    def names(self) -> list[str]:
        """Return the names of all models, each followed by its adapters as `model:adapter`. The default comes first."""
        return [
            name
            for base, model in self._models.items()
            for name in (base, *(f"{base}:{adapter}" for adapter in model.adapters))
        ]

    def find(self, name: str | None) -> ServedModel:
        """Return the model called `name`; for None the only model. Raises `ApiError` if there is none, or several."""
        if name is None:
            if len(self._models) > 1:
                raise ApiError(400, "model: is missing, and several are served; name one", param="model")
            name = next(iter(self._models))
        if len(name) > _LONGEST_NAME:
            raise ApiError(404, "the model's name is too long", param="model", code="model_not_found")
        found = self._exact(name)
        if found is None:
            target = next((to for pattern, to in self._aliases.items() if fnmatchcase(name, pattern)), None)
            found = self._exact(target) if target is not None else None
        if found is None:
            raise ApiError(
                404, f"the model {quote_short(name)} does not exist; /v1/models lists those that do",
                param="model", code="model_not_found",
            )  # fmt: skip
        return found

    def _exact(self, name: str) -> ServedModel | None:
        if name in self._models:
            return ServedModel(name, self._models[name])
        base, _, adapter = name.rpartition(":")
        model = self._models.get(base)
        if model is not None and adapter in model.adapters:
            return ServedModel(name, model, adapter)
        return None

    def default_sampling(self, model: ServedModel) -> dict[str, Any]:
        """Return the sampling that the model's authors recommend, for requests without sampling options."""
        artifact = model.model.artifact
        if artifact is None:
            return {}
        key = artifact.sha256
        if key not in self._defaults:
            self._defaults[key] = chat_sampling(artifact.folder, {}).options
        return self._defaults[key]
