"""The torch model with an adapter merged into its dequantised weights: the reference for engines."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from edgekit.model.lora import LoraAdapter


def adapted_reference(reference: Any, adapter: LoraAdapter) -> Any:
    """A copy of a transformers model whose linears are `W + B·A·scale`."""
    import torch

    model = copy.deepcopy(reference)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for module, part in adapter.modules.items():
            weights[f"{module}.weight"].add_(torch.from_numpy(part.b @ part.a))
    return model


def difference(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The largest difference, as a share of the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
