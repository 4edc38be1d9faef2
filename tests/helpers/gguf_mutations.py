"""Mutated GGUF files, read as a model source is: header, config, tensors, tokenizer.

python tests/helpers/gguf_mutations.py --count 1000000 --seed 1
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import fuzzing
import gguf_files as files

from edgekit.formats.gguf_tensors import GgufTensors, open_shards
from edgekit.model.gguf_config import huggingface_model
from edgekit.model.gguf_tokenizer import tokenizer_files

_SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 300}


class GgufFormat:
    """A small file of each family."""

    def __init__(self, folder: Path) -> None:
        self.wholes = {}
        for name, config in files.FAMILIES.items():
            small = {**config, **_SMALL}
            self.wholes[folder / f"{name}.gguf"] = files.model_file(small, files.random_tensors(small))

    def damaged(self, path: Path, whole: bytes, draw: random.Random) -> bytes:
        return fuzzing.damaged_bytes(whole, draw)

    def read(self, path: Path) -> None:
        """Everything that a model source reads of a file."""
        shards = open_shards(path)
        try:
            metadata = shards[0].metadata
            shapes = {name: tensor.shape for shard in shards for name, tensor in shard.tensors.items()}
            found = huggingface_model(metadata, shapes, lambda name: shards[0].rows(name)[0].tolist(), str(path))
            for shard in shards:
                for name in shard.tensors:
                    shard.rows(name, slice(0, 4))
            tensors = GgufTensors(shards, found.views)
            assert set(tensors.entries) == set(found.views)
            tokenizer_files(metadata, str(path))
        finally:
            for shard in shards:
                shard.close()


if __name__ == "__main__":
    sys.exit(fuzzing.run({"gguf": GgufFormat}, "Read mutated GGUF files."))
