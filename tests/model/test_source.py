"""Model folders: shards, hub caches, older names, missing and foreign weights."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from configs import SMALL, Config, write_config
from safetensors_files import write_tensors
from shapes import LLAMA_32_1B, spec_of

from edgekit.errors import InvalidInput, Unsupported
from edgekit.model.source import open_source

LLAMA = SMALL | {"model_type": "llama"}
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 1024, "vocab_size": 50257, "eos_token_id": 50256,
}  # fmt: skip


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in spec_of(config).tensors()}


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of zeros, half precision."""
    write_tensors(path.parent, {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}, path.name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_config(tmp_path / "llama-tiny", LLAMA)


@pytest.mark.parametrize(("name", "parameters"), [("demo", 1_000_000), ("demo-draft", 100_000)])
def test_the_bundled_models_open_by_name(name: str, parameters: int) -> None:
    source = open_source(name, need_weights=True)
    assert source.name == source.spec.name == name
    assert source.spec.parameters > parameters
    assert source.spec.exportable is None
    assert source.has_weights
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in source.tokenizer_files}
    assert source.config_sha256 == hashlib.sha256((source.folder / "config.json").read_bytes()).hexdigest()


def test_a_config_alone_is_enough_to_plan(folder: Path) -> None:
    source = open_source(folder)
    assert (source.name, source.has_weights, source.tokenizer_files) == ("llama-tiny", False, ())
    with pytest.raises(InvalidInput, match=r"holds no model\.safetensors"):
        open_source(folder, need_weights=True)


def test_the_generation_config_names_the_ends_of_text(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert open_source(folder).spec.eos_ids == (7, 8)


def test_shards_are_read_through_their_index(folder: Path) -> None:
    shapes = shapes_of(LLAMA)
    shards = [dict(list(shapes.items())[:20]), dict(list(shapes.items())[20:])]
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        write_weights(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_source(folder, need_weights=True).has_weights
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert not open_source(folder).has_weights
    with pytest.raises(InvalidInput, match=r"model-00002-of-00002\.safetensors: cannot be read"):
        open_source(folder, need_weights=True)


def test_missing_wrong_and_surplus_tensors_are_named(folder: Path) -> None:
    shapes = shapes_of(LLAMA)
    del shapes["model.layers.1.mlp.up_proj.weight"]
    shapes["model.norm.weight"] = (33,)
    shapes["model.layers.6.mlp.up_proj.weight"] = (48, 32)
    write_weights(folder / "model.safetensors", shapes)
    with pytest.raises(InvalidInput) as caught:
        open_source(folder)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "wrong shape: model.norm.weight is [33], config.json says [32]" in message
    assert "not in a llama model: model.layers.6.mlp.up_proj.weight" in message
    assert "\n" not in message


def test_many_faults_are_counted_and_not_listed(folder: Path) -> None:
    write_weights(folder / "model.safetensors", {"model.embed_tokens.weight": (64, 32)})
    with pytest.raises(InvalidInput, match=r"missing: .* and \d+ more") as caught:
        open_source(folder)
    assert len(str(caught.value)) < 600


def test_a_copy_of_a_tied_head_and_old_buffers_are_accepted(folder: Path) -> None:
    tied = LLAMA | {"tie_word_embeddings": True}
    write_config(folder, tied)
    extra = {"lm_head.weight": (64, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    write_weights(folder / "model.safetensors", shapes_of(tied) | extra)
    assert open_source(folder).spec.tied


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_names_under_another_prefix_are_found(folder: Path, prefix: str) -> None:
    shapes = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else name: shape
        for name, shape in shapes_of(LLAMA).items()
    }
    write_weights(folder / "model.safetensors", shapes)
    spec = open_source(folder).spec
    assert spec.prefix == prefix
    assert {tensor.name for tensor in spec.tensors()} == set(shapes)


def test_weights_that_are_quantised_already_can_be_planned(folder: Path) -> None:
    write_config(folder, LLAMA | {"quantization_config": {"quant_method": "aqlm"}})
    write_weights(folder / "model.safetensors", {"model.layers.0.mlp.up_proj.qweight": (4, 4)})
    source = open_source(folder)
    assert source.spec.exportable is not None
    assert "aqlm" in source.spec.exportable


def cached(root: Path, config: Config) -> Path:
    """A hub cache as huggingface_hub lays it out: snapshots that link to blobs."""
    repository = root / "models--org--llama-tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    for part in (snapshot, repository / "blobs", repository / "refs"):
        part.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "blobs" / "abc").write_text(json.dumps(config))
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    return snapshot


def test_a_hub_id_is_taken_from_the_cache_when_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = cached(tmp_path, LLAMA_32_1B)
    source = open_source("org/llama-tiny", offline=True)
    assert (source.name, source.folder) == ("llama-tiny", snapshot)
    assert source.spec.parameters == 1_235_814_400
    assert open_source(snapshot).name == "llama-tiny"


@pytest.mark.parametrize("how", ["asked", "by the environment"])
def test_an_uncached_hub_id_is_refused_offline(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "by the environment")
    with pytest.raises(InvalidInput, match=r"'org/other': edgekit is offline, and it is not in the hub's cache; give"):
        open_source("org/other", offline=how == "asked")


class Hub(BaseHTTPRequestHandler):
    """A minimal hub for fetching snapshots; `files` is the content of its only model, `asked` the requested files."""

    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []
    commit = "1" * 40

    def do_HEAD(self) -> None:
        self._file(with_body=False)

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/org/tiny/"):
            self._send(200, json.dumps(self._listing()).encode())
        else:
            self._file(with_body=True)

    def _listing(self) -> object:
        if "/tree/" in self.path:
            return [{"type": "file", "path": name, "size": len(data), "oid": "a"} for name, data in self.files.items()]
        return {"id": "org/tiny", "sha": self.commit, "siblings": [{"rfilename": name} for name in self.files]}

    def _file(self, *, with_body: bool) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        data = self.files.get(name) if self.path.startswith("/org/tiny/resolve/") else None
        if data is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        if with_body:
            self.asked.append(name)
        etag = hashlib.sha256(data).hexdigest()
        self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": self.commit}, with_body=with_body)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, *, with_body: bool = True) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(folder: Path) -> Iterator[str]:
    write_weights(folder / "model.safetensors", shapes_of(LLAMA))
    Hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    Hub.files |= {"generation_config.json": b'{"eos_token_id": 7}', "modeling_evil.py": b"1 / 0", "old.bin": b"pickle"}
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _open_elsewhere(model: str, endpoint: str, cache: Path, options: str = "") -> subprocess.CompletedProcess[str]:
    """Open in a child process, because huggingface_hub reads its settings at import."""
    code = (
        "from edgekit.errors import EdgekitError; from edgekit.model.source import open_source\n"
        f"try:\n    source = open_source({model!r}{options})\n"
        "    print(source.name, source.spec.parameters, source.spec.eos_ids, source.has_weights)\n"
        "except EdgekitError as error:\n    print(error)\n"
    )
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()} | settings
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN_PATH": str(cache / "none"), "HF_HUB_ETAG_TIMEOUT": "2"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)


def test_a_hub_id_is_fetched_without_its_weights_until_they_are_needed(hub: str, tmp_path: Path) -> None:
    parameters = spec_of(LLAMA).parameters
    done = _open_elsewhere("org/tiny", hub, tmp_path / "cache")
    assert done.stdout.strip() == f"tiny {parameters} (7,) False", done.stderr
    assert sorted(Hub.asked) == ["config.json", "generation_config.json"]
    done = _open_elsewhere("org/tiny", hub, tmp_path / "cache", ", need_weights=True")
    assert done.stdout.strip() == f"tiny {parameters} (7,) True", done.stderr
    assert sorted(Hub.asked) == ["config.json", "generation_config.json", "model.safetensors"]


def test_an_unknown_hub_id_is_refused_in_one_line(hub: str, tmp_path: Path) -> None:
    done = _open_elsewhere("org/none", hub, tmp_path / "cache")
    assert "model 'org/none': no such model on the hub" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    done = _open_elsewhere("org/tiny", "http://127.0.0.1:9", tmp_path / "cache")
    assert "model 'org/tiny': the hub cannot be reached, and it is not in the hub's cache" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1


def test_links_of_a_hub_cache_that_leave_the_repository_are_refused(tmp_path: Path) -> None:
    snapshot = cached(tmp_path / "cache", LLAMA)
    (tmp_path / "secret").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInput, match="leaves the model's folder"):
        open_source(snapshot)


@pytest.mark.quantize
def test_other_families_are_sized_by_the_shapes_that_optimum_knows(tmp_path: Path) -> None:
    pytest.importorskip("optimum")
    spec = open_source(write_config(tmp_path, GPT2)).spec
    assert (spec.hidden_size, len(spec.layers), spec.heads, spec.kv_heads) == (768, 12, 12, 12)
    assert (spec.vocab_size, spec.max_positions, spec.eos_ids) == (50257, 1024, (50256,))
    assert spec.exportable is not None
    assert "optimum" in spec.exportable
    assert "export supports arcee, bert" in spec.exportable
    assert 124_000_000 < spec.parameters < 160_000_000  # 124 M; a gated feed-forward is assumed


@pytest.mark.quantize
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2 | {"n_embd": -1}, "hidden_size"),
        (GPT2 | {"n_head": 7}, "is not a multiple of the 7"),
        (GPT2 | {"architectures": ["GPT2ForSequenceClassification"]}, "generates text"),
        (GPT2 | {"model_type": "unheard_of"}, "supported: arcee, bert"),
    ],
    ids=["negative", "heads", "a classifier", "unknown to optimum"],
)
def test_other_families_are_checked_as_well(tmp_path: Path, config: Config, words: str) -> None:
    pytest.importorskip("optimum")
    with pytest.raises((InvalidInput, Unsupported), match=words):
        open_source(write_config(tmp_path, config))


def test_without_optimum_an_unknown_family_lists_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optimum.utils", None)
    with pytest.raises(Unsupported, match=r"'gpt2' is not supported; supported: arcee, bert, .*edgekit\[quantize\]"):
        open_source(write_config(tmp_path, GPT2))


def test_planning_from_a_config_loads_no_vendor_library(folder: Path) -> None:
    code = (
        f"import sys; from edgekit.model.source import open_source; open_source({str(folder)!r}); "
        "heavy = {'torch', 'transformers', 'optimum', 'numpy', 'huggingface_hub'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
