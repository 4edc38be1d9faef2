"""LoRA adapters beside packed integers: two small matrices a module, added to what the module says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from edgekit.adapters import read_adapter
from edgekit.errors import InvalidInput, UnknownName, Unsupported, clip
from edgekit.plan import Plan
from edgekit.weights.neutral import on_disk


class Added(NamedTuple):
    """What is added to a module's product: `(x · a) · b`, the scale being in `b`."""

    a: mx.array  # [inputs, rank]
    b: mx.array  # [rank, outputs]

    def __call__(self, inputs: mx.array) -> mx.array:
        return (inputs @ self.a) @ self.b


class Adapter(NamedTuple):
    """One adapter, its modules named as they are in the file of weights."""

    sha256: str
    modules: Mapping[str, Added]

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for added in self.modules.values() for part in added)


class Adapters:
    """The adapters of one engine."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._by_name: dict[str, Adapter] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)

    def find(self, name: str | None) -> Adapter | None:
        """None where no adapter is asked for."""
        if name is None:
            return None
        if name not in self._by_name:
            raise UnknownName("adapter", name, self._by_name)
        return self._by_name[name]

    def load(self, name: str, files: Path, numbers: mx.Dtype) -> int:
        """Read and check; on the engine's own thread."""
        model = self._plan.model
        if not self._plan.adapter_rank:
            raise Unsupported(
                f"mlx: adapter {clip(name)}: this artifact was exported without room for adapters; "
                "export it again with --adapter-rank (e.g. 16)"
            )
        if name in self._by_name:
            raise InvalidInput(f"adapter {clip(name)} is loaded already; drop it first")
        read = read_adapter(files, model, most_rank=self._plan.adapter_rank)
        modules = {
            on_disk(model, f"{module}.weight").removesuffix(".weight"): Added(
                mx.contiguous(mx.array(part.a.T).astype(numbers)), mx.contiguous(mx.array(part.b.T).astype(numbers))
            )
            for module, part in read.modules.items()
        }
        mx.eval([part for added in modules.values() for part in added])
        self._by_name[name] = Adapter(read.sha256, modules)
        return self._by_name[name].bytes

    def drop(self, name: str) -> None:
        self.find(name)
        del self._by_name[name]
