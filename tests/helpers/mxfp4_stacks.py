"""A tiny gpt-oss whose experts are stacks of random MXFP4 blocks, as the published files have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import family_models as models
import numpy as np
from safetensors.numpy import load_file, save_file

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
Arrays = dict[str, np.ndarray[Any, Any]]


def write_mxfp4(folder: Path) -> tuple[Arrays, Arrays]:
    """Write a tiny model with random blocks; return its tensors, and those that transformers reads in them."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    models.write_model(folder, *models.EXPERTS["gpt_oss"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    floats, random = load_file(folder / "model.safetensors"), np.random.default_rng(5)
    packed = dict(floats)
    for name in [name for name in floats if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = packed.pop(name).shape
        blocks = random.integers(0, 256, (count, outputs, inputs // 32, 16), np.uint8)
        scales = random.integers(122, 126, (count, outputs, inputs // 32), np.uint8)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        read = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        floats[name] = read.numpy()
    save_file(packed, folder / "model.safetensors")
    return packed, floats
