"""SmolLM2's neutral weights written as GGUF for llama.cpp and read back as a source: the same integers and scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgekit.common.progress import no_progress
from edgekit.contracts.recipe import named_recipe
from edgekit.formats.gguf import GgufFile
from edgekit.formats.gguf_tensors import GgufTensors, open_shards
from edgekit.model.gguf_config import huggingface_model
from edgekit.model.source import open_source
from edgekit.quant.neutral_gguf import write_neutral_gguf
from edgekit.quant.pipeline import neutral_weights

pytestmark = [pytest.mark.real, pytest.mark.quantize, pytest.mark.slow]


@pytest.mark.parametrize("recipe", ["s4-g64", "s8"])
def test_integers_survive_a_gguf(smollm2_short: Path, tmp_path: Path, recipe: str) -> None:
    source = open_source(smollm2_short, need_weights=True)
    weights = neutral_weights(source, named_recipe(recipe), method="rtn", progress=no_progress)
    write_neutral_gguf(weights, tmp_path / "smollm2.gguf", 256)
    shards = open_shards(tmp_path / "smollm2.gguf")
    try:
        shapes = {name: tensor.shape for shard in shards for name, tensor in shard.tensors.items()}
        found = huggingface_model(shards[0].metadata, shapes, lambda name: [], "smollm2.gguf")
        tensors = GgufTensors(shards, found.views)
        assert set(tensors.entries) == {tensor.name for tensor in weights.model.tensors()}
        for name in tensors.entries:
            assert np.array_equal(tensors.floats(name), weights.tensor(name)), name
    finally:
        for shard in shards:
            shard.close()
    assert stored_types(tmp_path / "smollm2.gguf") == ({"F32", "Q8_0"} | ({"Q4_0"} if recipe != "s8" else set()))


def stored_types(path: Path) -> set[str]:
    with GgufFile.open(path) as file:
        return {tensor.type_name for tensor in file.tensors.values()}
