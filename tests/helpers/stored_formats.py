"""Every format that edgekit writes and reads again, for the fuzzer.

python tests/helpers/stored_formats.py --count 100000 --seed 1
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fuzzing
import gguf_mutations
import published
import pytest
import runtimes
import safetensors_files
import tiny_encoders
import tiny_models
from certificates import Keys
from configs import TINY, write_config
from edgekit_onnx.audit import audit
from fake_artifacts import install, make_artifact
from lab_fakes import begun, lab_of
from measured import fake, measurement
from quantised_folders import LAYOUTS
from safetensors_files import entry
from tokenizers import Tokenizer

import edgekit
import edgekit.runtime.open as open_module
from edgekit.apps.bench.machine import Machine
from edgekit.apps.delivery import fetching, publish, pull, signing, site_index
from edgekit.apps.delivery.publish import read_site
from edgekit.apps.lab.report import junit, report_of, rows_of
from edgekit.apps.lab.store import AttemptEnd, LabStore
from edgekit.artifact import artifact
from edgekit.artifact.artifact import open_artifact
from edgekit.common import machine_speed
from edgekit.contracts import neutral
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.contracts.memory import usual_terms
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported
from edgekit.formats.safetensors import INDEX, TensorFolder, read_header
from edgekit.model.lora import read_adapter
from edgekit.model.rope import frequencies
from edgekit.model.source import open_source, open_tensors
from edgekit.model.spec import ModelSpec
from edgekit.planner.make import make_plans, read_plan, targets_for
from edgekit.planner.memory import explain
from edgekit.planner.request import PlanRequest
from edgekit.quant.pipeline import neutral_weights
from edgekit.runtime.generation.chat_template import read_template
from edgekit.runtime.generation.reasoning import ReasoningReader
from edgekit.runtime.generation.stopping import StopStrings
from edgekit.runtime.generation.tokenizer import Codec
from edgekit.runtime.generation.tool_calls import ToolCallReader
from edgekit.runtime.memory.admission import RunConfig, estimate_of
from edgekit.runtime.speculation import costs
from edgekit.testing import FakeEngine, write_adapter


def check_plan(plan: Plan) -> None:
    """Compute everything that is computed from a plan alone."""
    target = targets_for(None).get(plan.target)
    memory = usual_terms if target is None else target.memory
    assert len(explain(plan, memory)) > 5 and plan.all_notes is not None
    config = RunConfig(kv_config=plan.storage, policy=plan.cache, sequences=plan.sequences)
    assert math.isfinite(plan.estimate.total_bytes + estimate_of(plan, config, memory).total_bytes)
    for rope in plan.model.ropes.values():
        if rope.dim <= 1 << 12:
            assert all(math.isfinite(value) for value in frequencies(rope, plan.context)[0])


class Plans(fuzzing.JsonFormat):
    """A plan as `edgekit plan -o` writes it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        for device in ("laptop-x86-16gb", "macbook-m4-24gb"):
            plan = make_plans("demo", [device])[0]
            path = folder / f"{device}.json"
            path.write_text(plan.model_copy(update={"rejected": plan.rejected[:3]}).to_json())
            self.add(path)

    def read(self, path: Path) -> None:
        plan = read_plan(path)
        check_plan(plan)
        Plan.model_validate_json(plan.to_json())


class Artifacts(fuzzing.JsonFormat):
    """Every text file of a fake target's artifact, sealed again; each is opened and answers prompts."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._make(folder)
        for path in sorted((folder / "a.edgekit").rglob("*")):
            if path.suffix in (".json", ".jinja"):
                self.add(path)

    def _make(self, folder: Path) -> None:
        fake(folder / "a.edgekit")

    def read(self, path: Path) -> None:
        manifest = path.parent / artifact.MANIFEST
        self.seal_with(path, manifest)
        try:
            check_plan(artifact.read_manifest(path.parent).plan)
            with (
                patch.object(open_module, "mapped_data_bytes", lambda: None),
                edgekit.open(path.parent, memory="2GiB") as runtime,
            ):
                runtime.complete([5, 6, 7], max_tokens=1, ignore_eos=True)
                runtime.generate("the cat", max_tokens=3)
            artifact.verify(path.parent)
        finally:
            if path != manifest:
                manifest.write_bytes(self.wholes[manifest])


class OnnxArtifacts(Artifacts):
    """The same for an artifact that onnxruntime runs."""

    def _make(self, folder: Path) -> None:
        model = tiny_models.write_tiny(folder / "tiny", layers=1)
        tiny_models.artifact_of(model, folder / "a.edgekit", context=64)


class SavedPrefixes(fuzzing.JsonFormat):
    """A file of saved prefixes, which a runtime over onnx reads and answers with."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        model = tiny_models.write_tiny(folder / "tiny", layers=1)
        place = tiny_models.artifact_of(model, folder / "onnx.edgekit", context=64)
        self._runtime = edgekit.open(place, prefixes="1MiB", memory="2GiB")
        self._prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 50, 51, 52]]
        for prompt in self._prompts:
            self._runtime.complete(prompt, max_tokens=1, ignore_eos=True)
        path = folder / "saved.prefixes"
        assert self._runtime.save_prefixes(path) > 0
        self.add(path)
        self._runtime.close()
        self._runtime = edgekit.open(place, prefixes="64KiB", memory="2GiB")

    def damaged(self, path: Path, whole: bytes, draw: random.Random) -> bytes:
        """Damage the header's fields, with its length right, or any bytes."""
        start = len(b"edgekit prefixes 1\n")
        end = start + 8 + int.from_bytes(whole[start : start + 8], "little")
        if draw.random() < 0.5:
            return fuzzing.damaged_bytes(whole, draw, header=end)
        header = fuzzing.damaged_fields(json.loads(whole[start + 8 : end]), draw).encode()
        return whole[:start] + len(header).to_bytes(8, "little") + header + whole[end:]

    def read(self, path: Path) -> None:
        self._runtime.load_prefixes(path)
        self._runtime.complete(self._prompts[0], max_tokens=1, ignore_eos=True)


class Tensors(fuzzing.JsonFormat):
    """Safetensors of a model: one file, and shards with an index; every tensor is read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        single, shards = folder / "one", folder / "several"
        single.mkdir()
        shards.mkdir()
        header = {
            "layers.wide": entry("F32", [2, 3], 0, 24),
            "layers.narrow": entry("BF16", [2, 3], 24, 36),
            "layers.bytes": entry("I8", [2, 3, 1], 36, 42),
        }
        self.add(safetensors_files.write(single / "model.safetensors", header, bytes(range(42))))
        weight_map = {}
        for place in range(2):
            name, shard = f"layers.{place}", f"model-{place}.safetensors"
            self.add(safetensors_files.write(shards / shard, {name: entry("F32", [2, 3], 0, 24)}, bytes(24)))
            weight_map[name] = shard
        (shards / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        self.add(shards / INDEX)

    def read(self, path: Path) -> None:
        with TensorFolder.open(path.parent) as tensors:
            for name in tensors.entries:
                tensors.array(name).tobytes()
                tensors.array(name, slice(0, 1)).tobytes()
                with suppress(InvalidInput):
                    tensors.floats(name)
                tensors.release(name)


class Neutral(fuzzing.JsonFormat):
    """Neutral weights: manifest, index, config and shards; each is opened, verified and dequantised."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        model = tiny_models.write_tiny(folder / "tiny", layers=1)
        made = neutral_weights(open_source(model, need_weights=True), named_recipe("s4-g32"))
        self._folder = folder / "weights"
        shutil.copytree(made.folder, self._folder)
        for path in sorted(self._folder.iterdir()):
            if path.suffix in (".json", ".safetensors") and not path.name.startswith("tokenizer"):
                self.add(path)

    def read(self, path: Path) -> None:
        manifest = self._folder / neutral.MANIFEST
        self.seal_with(path, manifest)
        try:
            weights = neutral.NeutralWeights.open(self._folder)
            for module in weights.modules():
                assert weights.dequantised(module, slice(0, 2)).dtype == "float32"
            weights.verify()
        finally:
            if path != manifest:
                manifest.write_bytes(self.wholes[manifest])


class Tokenizers(fuzzing.JsonFormat):
    """Tokenizers of several kinds; each encodes a text and decodes tokens."""

    makers: Sequence[Callable[[], Tokenizer]] = (*runtimes.TOKENIZERS.values(), tiny_encoders.wordpiece)

    def __init__(self, folder: Path) -> None:
        super().__init__()
        for place, make in enumerate(self.makers):
            path = folder / f"{place}.json"
            path.write_text(make().to_str())
            self.add(path)

    def read(self, path: Path) -> None:
        codec = Codec(path.read_bytes(), str(path))
        tokens = codec.encode(TEXT, add_special_tokens=True)
        stream = codec.stream()
        for token in tokens:
            stream.push(token)
        stream.flush()
        codec.decode([0, 1, 300, 5, 263], skip_special=False)
        for token in range(8):
            codec.token_bytes(token)


class ModelFolders(fuzzing.JsonFormat):
    """Every text file of a model's folder, with an adapter in it, and configs of every family and scheme: what
    plans, exports and chats read."""

    most_cases = 2000

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = tiny_models.write_tiny(folder / "tiny", layers=1)
        write_adapter(self._folder / "adapter", open_source(self._folder).spec)
        with suppress(InvalidInput, Unsupported):  # transformers, which an unknown family loads, is loaded now
            (folder / "config.json").write_text(json.dumps({"model_type": "unknown", "hidden_size": 64}))
            open_source(folder)
        self._configs = TINY | {name: TINY["llama"] | each.config(4, 32) for name, each in LAYOUTS.items()}
        for name, config in self._configs.items():
            write_config(self._folder / "families" / name, config)
        (self._folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.5}))
        (self._folder / "chat_template.jinja").write_text(tiny_models.TEMPLATE)
        weight_map = dict.fromkeys(read_header(self._folder / "model.safetensors"), "model.safetensors")
        (self._folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        for path in sorted(self._folder.rglob("*")):
            if path.suffix in (".json", ".jinja") or path.parent.name == "adapter":
                self.add(path)

    def damaged(self, path: Path, whole: bytes, draw: random.Random) -> bytes:
        if "families" in path.parts and draw.random() < 0.2:  # fields that another family has
            others = draw.choices([*draw.choice(list(self._configs.values())).items()], k=2)
            return json.dumps(json.loads(whole) | dict(others)).encode()
        return super().damaged(path, whole, draw)

    def read(self, path: Path) -> None:
        if "families" in path.parts:
            source = open_source(path.parent)
            assert ModelSpec.model_validate_json(source.spec.model_dump_json()) == source.spec
            with suppress(DoesNotFit):
                make_plans(source, ["laptop-x86-16gb"], PlanRequest(context=64))
            return
        source = open_source(self._folder, need_weights=True)
        if path.parent.name == "adapter":
            read_adapter(path.parent, source.spec, most_rank=8)
        elif path.name == "tokenizer.json":
            Codec(path.read_bytes(), path.name).encode(TEXT, add_special_tokens=True)
        elif path.name in ("chat_template.jinja", "tokenizer_config.json"):
            with closing(read_template(self._folder)) as template:
                template.render([{"role": "user", "content": TEXT}])
        else:
            make_plans(source, ["laptop-x86-16gb"], PlanRequest(target="onnx", context=64))
            with open_tensors(source.weights) as tensors:
                for tensor in source.spec.tensors():
                    tensors.floats(tensor.name, slice(0, 1))


class Signatures(fuzzing.JsonFormat):
    """A signature with a certificate, which is checked against its authority."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        keys, path = Keys(folder), folder / "index.json.sig.json"
        path.write_bytes(signing.sign_bytes("index.json", b"{}", signing.Signer(keys.key, keys.certificate)))
        self._root = keys.root
        self.add(path)

    def read(self, path: Path) -> None:
        signing.check_signature({"index.json": b"{}"}, self._root, signature=path.read_bytes())


class Sites(fuzzing.JsonFormat):
    """The index of a site, which a publisher continues and an installation pulls from."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._device, artifact = published.device_profile(folder), make_artifact(folder / "artifact")
        for release in ("1", "2"):
            publish([artifact], folder / "site", release=release, rollout=0.9)
        self.add(folder / "site" / site_index.INDEX)

    def read(self, path: Path) -> None:
        read_site(path.parent)
        with tempfile.TemporaryDirectory() as app, patch.object(fetching, "_FIRST_WAIT_S", 0.0):
            pull(path.parent.as_uri(), Path(app) / "app", device=self._device, allow=("file",))


class Answers(fuzzing.JsonFormat):
    """What a model may write: pieces of calls, of reasoning and of JSON, repeated and cut, and tokens of any bytes."""

    pieces = (
        "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "functools[",
        "<|python_tag|>", "<|eom_id|>", "```tool_code\n", "```json\n", "```", '{"name": "add", "arguments": {"a": 1}}',
        "add(a=1)", "add(", "[", "]", "{", "}", '"', "\\", ", ", ": ", "\n", " ", "-", "1e400", "\\u", "\0", "é", "日",
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        super().__init__()
        path = folder / "answer.txt"
        path.write_text('<think>a</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        self.add(path)
        self._codec = Codec(runtimes.byte_level().to_str().encode(), "tokenizer.json")

    def damaged(self, path: Path, whole: bytes, draw: random.Random) -> bytes:
        most = 3000 if draw.random() < 0.01 else 12
        return "".join(draw.choice(self.pieces) * draw.choice((1, 1, 1, 2, most)) for _ in range(12)).encode()

    def read(self, path: Path) -> None:
        text = path.read_bytes().decode()
        calls, reasoning, stops = ToolCallReader(["add"], "seed"), ReasoningReader(), StopStrings(("```", "}}"))
        step = max(1, len(text) // 50)
        for start in range(0, len(text), step):
            split = reasoning.push(text[start : start + step])
            json.dumps([[call.arguments for call in calls.push(split.content)], len(calls.deltas())])
            calls.take_content()
            stops.push(text[start : start + step])
        calls.push(reasoning.finish().content)
        calls.finish()
        assert len(stops.flush()) <= len(text) and len(calls.content) <= len(text)
        stream = self._codec.stream()
        for byte in path.read_bytes()[:3000]:
            stream.push(byte % self._codec.vocabulary)
        stream.flush()


class LabStores(fuzzing.JsonFormat):
    """A store of lab runs: cells of its tables, fields of the JSON in them, and bytes of the file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        path = folder / "lab.sqlite"
        with LabStore(path) as store:
            lab = lab_of(folder, 1)
            self._runs = [begun(store, lab), begun(store, lab)]
            for run in self._runs:
                while (taken := store.take(run, "device-0", 1.0)) is not None:
                    entry, number = taken
                    made = measurement([100.0, 101.0, 99.0])
                    store.end(run, entry.id, number, AttemptEnd("measured", "done", result=made), 2.0)
                store.finish(run, 3.0)
        self.add(path)
        self._base = sqlite3.connect(":memory:")
        self._base.deserialize(self._rollback_mode(self.wholes[path]))
        self._cells = [
            (table, column, value)
            for (table,) in self._base.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall()
            for (_, column, *_rest) in self._base.execute(f"PRAGMA table_info({table})").fetchall()
            for (value,) in self._base.execute(f"SELECT {column} FROM {table}").fetchall()
        ]

    @staticmethod
    def _rollback_mode(whole: bytes) -> bytes:
        return whole[:18] + b"\x01\x01" + whole[20:]  # write-ahead logs are for files

    def damaged(self, path: Path, whole: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.5:
            return fuzzing.damaged_bytes(whole, draw, header=len(whole))
        base = sqlite3.connect(":memory:")
        base.deserialize(self._rollback_mode(whole))
        for _ in range(draw.randint(1, 2)):
            table, column, value = draw.choice(self._cells)
            if isinstance(value, str) and value.startswith("{") and draw.random() < 0.8:
                changed: Any = fuzzing.damaged_fields(json.loads(value), draw)
            else:
                changed = draw.choice((None, -1, 0, 1e308, "", "x", b"\xff\xfe", 1 << 62, "x" * 20_000, "{}", "[]"))
            try:
                base.execute(f"UPDATE {table} SET {column}=? WHERE {column} IS ?", (changed, value))
            except sqlite3.IntegrityError:
                continue
        base.commit()
        return base.serialize()

    def read(self, path: Path) -> None:
        for name in ("-wal", "-shm", "-journal"):
            path.with_name(path.name + name).unlink(missing_ok=True)
        with LabStore(path) as store:
            for info in store.history():
                rows = list(rows_of(store, info.id, self._runs[0]))
                report_of(store, info.id, rows, None)
                junit(store, info.id, rows)
                for entry, _ in store.entries(info.id):
                    store.plan(entry.artifact_sha256)
                    store.outcomes(info.id, entry.id)
                store.states(info.id, "device-0")
                store.trouble(info.id, 10)
                store.reopen(info.id, 5.0)
                store.take(info.id, "device-0", 6.0)


# Every kind of fact that edgekit keeps about this machine, and a mark. A kind is a function that makes what a use needs
# in a folder and returns the use: the first one writes the fact, later ones read it. What they would measure or check
# is constant here, so that a mark must come out as it was.
Use = Callable[[], Any]
_KEY = "0" * 64


def _forward_cost(_: Path) -> Use:
    engine, config = FakeEngine(vocabulary=300), KVCacheConfig(capacity_tokens=64, kv_bits=16)

    def use() -> None:
        with patch.object(costs, "by_turns", lambda trials: {size: 1.0 + size / 8 for size in trials}):
            cost = costs.known_costs(engine, config, _KEY)
        assert all(math.isfinite(ratio) and ratio > 0 for ratio in cost.ratios().values())

    return use


def _share(_: Path) -> Use:
    probe = costs.CostProbe(FakeEngine(vocabulary=300), KVCacheConfig(capacity_tokens=64, kv_bits=16))

    def use() -> None:
        with patch.object(costs, "by_turns", lambda trials: {size: 1.0 + size / 8 for size in trials}):
            assert 0 < costs.known_share("share", _KEY, probe, probe) < math.inf

    return use


def _speed(_: Path) -> Use:
    measured = machine_speed.MachineSpeed(read_gb_s=5.0, fp32_tflops=0.05, cores=2)

    def use() -> None:
        with patch.object(machine_speed, "_in_a_child", lambda *_: measured):
            speed = machine_speed.machine_speed(2, 1 << 20, 1 << 30)
        assert 0 < speed.read_gb_s < 1e6 and 0 < speed.fp32_tflops < 1e6 and speed.cores == 2

    return use


def _canary(_: Path) -> Use:
    def use() -> None:
        with patch.object(Machine, "_canary", lambda _: 0.01):
            machine = Machine()
            machine.remember()
        assert 0 < machine.best_s <= 0.01

    return use


def _verified(folder: Path) -> Use:
    place = fake(folder / "a.edgekit").folder
    return lambda: open_artifact(place)


def _audited(folder: Path) -> Use:
    made = open_artifact(
        tiny_models.artifact_of(tiny_models.write_tiny(folder / "tiny", layers=1), folder / "a.edgekit")
    )
    files = next(made.folder.rglob("*.onnx")).parent
    return lambda: audit(made.plan, files)


MEASURED: dict[str, Callable[[Path], Use]] = {
    "forward-cost": _forward_cost, "share": _share, "speed": _speed, "canary": _canary, "audited": _audited,
}  # fmt: skip
MARKS: dict[str, Callable[[Path], Use]] = {"verified": _verified}  # one function compares all marks
KINDS = MEASURED | MARKS


class Facts(fuzzing.JsonFormat):
    """One kind of fact or mark: a damaged one is made again, never trusted and never an error."""

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__()
        home = folder / "home"
        os.environ["EDGEKIT_HOME"] = str(home)
        self._use = KINDS[kind](folder)
        shutil.rmtree(home / "facts", ignore_errors=True)  # what an export wrote
        self._use()
        for path in home.glob("facts/**/*.json"):
            self.add(path)
        assert len(self.wholes) == 1, [*self.wholes]
        self._is_mark = kind in MARKS

    def read(self, path: Path) -> None:
        self._use()
        assert not self._is_mark or path.read_bytes() == self.wholes[path]


TEXT = "the cat sat on façade 日本 <tool_call> 12\n"

FORMATS: dict[str, Callable[[Path], fuzzing.Fuzzed]] = {
    "plan": Plans,
    "artifact": Artifacts,
    "artifact-onnx": OnnxArtifacts,
    "prefixes": SavedPrefixes,
    **{f"fact-{kind}": partial(Facts, kind) for kind in KINDS},
    "safetensors": Tensors,
    "weights": Neutral,
    "lab": LabStores,
    "tokenizer": Tokenizers,
    "model-folder": ModelFolders,
    "signature": Signatures,
    "site": Sites,
    "answer": Answers,
    "gguf": gguf_mutations.GgufFormat,
}

if __name__ == "__main__":
    install(Path(tempfile.mkdtemp()), pytest.MonkeyPatch())
    sys.exit(fuzzing.run(FORMATS, "Read damaged files of every stored format."))
