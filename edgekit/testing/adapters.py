"""Writes random LoRA adapters as PEFT saves them, for tests of loaders and engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekit.common.files import write_file
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.lora import CONFIG, WEIGHTS, adaptable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.model.spec import ModelSpec


def write_adapter(
    folder: Path,
    model: ModelSpec,
    *,
    seed: int = 0,
    rank: int = 4,
    size: float = 0.3,
    only: Callable[[str], bool] = lambda module: True,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter for the linears that `only` accepts, with values of about `size`; `config` adds fields."""
    random, sizes = np.random.default_rng(seed), adaptable(model)
    tensors: dict[str, NDArray[np.float32]] = {}
    for module, (outputs, inputs) in sizes.items():
        if only(module):
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = random.standard_normal(shape) * size / shape[1] ** 0.5
                tensors[f"base_model.model.{module}.lora_{side}.weight"] = values.astype(np.float32)
    targets = sorted({module.rpartition(".")[2] for module in sizes if only(module)})
    said = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "lora_dropout": 0.05,
        "bias": "none", "target_modules": targets, "inference_mode": True, "use_rslora": False, "use_dora": False,
        "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, **(config or {}),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / CONFIG, json.dumps(said, indent=1).encode())
    with TensorWriter(folder / WEIGHTS, {name: ("F32", values.shape) for name, values in tensors.items()}) as file:
        for name, values in tensors.items():
            file.write(name, values)
        file.seal()
    return folder
