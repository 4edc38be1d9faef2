"""Mutated GGUF files, read as a model source is: header, config, tensors, tokenizer.

python tests/helpers/gguf_mutations.py --count 1000000 --seed 1
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import fuzzing
import gguf_files as files

from edgekit.formats.gguf import GgufFile
from edgekit.formats.gguf_tensors import GgufTensors, open_shards
from edgekit.model.gguf_config import huggingface_model
from edgekit.model.gguf_tokenizer import tokenizer_files

_SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 300}


_NUMBERS = (
    -1,
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    255,
    300,
    4096,
    1 << 16,
    1 << 24,
    *((1 << bits) - 1 for bits in (31, 32, 63)),
)
_FLOATS = (0.0, -0.0, -1.0, 0.5, 1e-38, 1e30, float("inf"), float("nan"))
_TEXTS = ("", "x", "llama", "gpt2", "gemma3", "yarn", "longrope", "\0", "{{", "{% for x in y %}", "a b", "▁", "<0x41>")


class GgufFormat:
    """A small file of each family."""

    def __init__(self, folder: Path) -> None:
        self.wholes: dict[Path, bytes] = {}
        self._metadata: dict[Path, dict[str, files.Value]] = {}
        self._header_bytes: dict[Path, int] = {}
        for name, config in files.FAMILIES.items():
            small = {**config, **_SMALL}
            path = folder / f"{name}.gguf"
            self._metadata[path] = files.metadata_of(files.architecture_of(small), small)
            self.wholes[path] = files.model_file(small, files.random_tensors(small))
            path.write_bytes(self.wholes[path])
            with GgufFile.open(path) as file:
                self._header_bytes[path] = file.header_bytes

    def damaged(self, path: Path, whole: bytes, draw: random.Random) -> bytes:
        """Damage bytes, or change one or two values of the metadata, after which the file is read further."""
        if draw.random() < 0.5:
            return fuzzing.damaged_bytes(whole, draw)
        metadata = dict(self._metadata[path])
        for _ in range(draw.randint(1, 2)):
            key = draw.choice(list(metadata))
            metadata[key] = _other(metadata[key], draw)
        return files.with_metadata(whole, self._header_bytes[path], self._metadata[path], metadata)

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


def _other(value: files.Value, draw: random.Random) -> files.Value:
    """Another value of the same type; of a list, another item or length; or a value of another type."""
    if draw.random() < 0.1:
        return files.Value(files.STRING, draw.choice(_TEXTS))
    if value.kind == files.ARRAY:
        items = list(value.value)
        if not items:
            return value
        match draw.randrange(4):
            case 0:
                items = items[: draw.randrange(len(items))]
            case 1:
                items *= draw.choice((2, 30))
            case 2:
                draw.shuffle(items)
            case _:
                for _ in range(draw.randint(1, 3)):
                    place = draw.randrange(len(items))
                    items[place] = _item(value.item or files.U8, draw.choice((items[place], draw.choice(items))), draw)
        return value._replace(value=items)
    return value._replace(value=_item(value.kind, value.value, draw))


def _item(kind: int, old: Any, draw: random.Random) -> Any:
    if kind == files.STRING:
        return draw.choice((*_TEXTS, old + old, old[:-1], old.upper(), old * draw.choice((1, 300))))
    if kind == files.BOOL:
        return not old
    if kind in (files.F32, files.F64):
        return draw.choice((*_FLOATS, -old, old * 1e9))
    return files.fitting(kind, draw.choice((*_NUMBERS, old + 1, old - 1, old * 2)))


if __name__ == "__main__":
    sys.exit(fuzzing.run({"gguf": GgufFormat}, "Read mutated GGUF files."))
