"""Folders that compressed-tensors itself wrote: its packing is undone by its own functions and by ours, equally."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import family_models as models
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from edgekit.common.content_store import ContentStore
from edgekit.model.source import open_source
from edgekit.quant.own_integers import own_integers
from edgekit.quant.pipeline import neutral_weights
from edgekit.testing import check_weights

pytestmark = [pytest.mark.quantize, pytest.mark.usefixtures("home")]


def compressed(folder: Path, weights: dict[str, Any]) -> Path:
    """A small Llama in bfloat16 that compressed-tensors quantised to the nearest and packed."""
    from transformers import AutoModelForCausalLM

    kind, config = models.FAMILIES["llama"]
    models.write_model(folder, kind, config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            grouped = module.weight.reshape(len(module.weight), -1, scheme.weights.group_size or module.in_features)
            scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {name: values.contiguous() for name, values in model.state_dict().items() if name not in tied}
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    compressor.update_config(str(folder))
    return folder


@pytest.mark.onnx
@pytest.mark.mlx
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, None])
def test_a_folder_of_compressed_tensors_is_kept_on_onnx_and_mlx(bits: int, group: int | None, tmp_path: Path) -> None:
    from edgekit_mlx import MlxTarget
    from edgekit_onnx import OnnxTarget

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    model = compressed(tmp_path / "model", {"num_bits": bits, "type": "int", "symmetric": True, **strategy})
    stated = json.loads((model / "config.json").read_text())["quantization_config"]
    assert (stated["quant_method"], stated["format"]) == ("compressed-tensors", "pack-quantized")
    own = own_integers(open_source(model))
    assert own is not None
    assert own.recipe.keeps is not None and own.recipe.keeps.startswith(f"W{bits}A16, ")
    weights = neutral_weights(model, own.recipe, store=ContentStore(tmp_path / "store"))
    stored = load_file(model / "model.safetensors")
    packed = [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]
    assert len(packed) == sum(tensor.role == "linear" for tensor in weights.model.tensors())
    for module in packed:
        shape = torch.Size(stored[f"{module}.weight_shape"].tolist())
        integers = unpack_from_int32(stored[f"{module}.weight_packed"], bits, shape)
        assert np.array_equal(weights.integers(module), integers.numpy())
        scales = stored[f"{module}.weight_scale"].float().numpy()
        found = weights.scales(module)
        assert np.array_equal(found, np.repeat(scales, found.shape[1] // scales.shape[1], axis=1))
    for target in (OnnxTarget(), MlxTarget()):
        plan = models.plan_for(weights.model, weights.recipe).model_copy(update={"target": target.name})
        (tmp_path / target.name).mkdir()
        target.export(plan, weights, tmp_path / target.name, models.quiet)
        check_weights(target, plan, tmp_path / target.name, weights)
