"""LoRA adapters on packed integers: two small matrices for each module, added to its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx

from edgekit.contracts.neutral import on_disk
from edgekit.model.lora import LoraAdapter
from edgekit.model.spec import ModelSpec


class Delta(NamedTuple):
    """The term added to a module's product: `(x · a) · b`, with the adapter's scale in `b`."""

    a: mx.array  # [inputs, rank]
    b: mx.array  # [rank, outputs]

    def __call__(self, inputs: mx.array) -> mx.array:
        return (inputs @ self.a) @ self.b


class MlxAdapter(NamedTuple):
    """One adapter, its modules named as in the file of weights."""

    sha256: str
    modules: Mapping[str, Delta]

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for added in self.modules.values() for part in added)


def convert_adapter(model: ModelSpec, adapter: LoraAdapter, numbers: mx.Dtype) -> MlxAdapter:
    """Copy an adapter's matrices to MLX, in the type of activations; on the engine's thread."""
    modules = {
        on_disk(model, f"{module}.weight").removesuffix(".weight"): Delta(
            mx.contiguous(mx.array(part.a.T).astype(numbers)), mx.contiguous(mx.array(part.b.T).astype(numbers))
        )
        for module, part in adapter.modules.items()
    }
    mx.eval([part for added in modules.values() for part in added])
    return MlxAdapter(adapter.sha256, modules)
