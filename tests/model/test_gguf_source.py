"""GGUF files as models: companion files, weights, and notes on quantised files."""

from __future__ import annotations

import gc
import hashlib
import json
import threading
from pathlib import Path

import gguf_files as files
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from gguf_files import STRING, U16, Stored, Value
from safetensors_files import write_tensors

from edgekit.cli import command
from edgekit.common.content_store import IN_USE, ContentStore
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import InvalidInput, Unsupported
from edgekit.model import gguf_source
from edgekit.model.source import open_source, open_tensors
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest

pytestmark = pytest.mark.usefixtures("home")

DEVICE = "laptop-x86-16gb"
LLAMA = files.FAMILIES["llama"]
TWICE = "the source is {}, not float: with this recipe its values are rounded twice"
EXACT = "the source is {}, not float: float32 keeps its values as they are"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small float model."""
    files.write_family(tmp_path / "tiny.gguf", "llama")
    return tmp_path / "tiny.gguf"


def write_quantised(path: Path) -> dict[str, np.ndarray]:
    """A small model in Q8_0 and Q4_0; returns the values that its matrices stand for."""
    weights = files.random_tensors(LLAMA)
    types = {name: Type.Q8_0 if "embed" in name else Type.Q4_0 for name, values in weights.items() if values.ndim == 2}
    path.write_bytes(files.model_file(LLAMA, weights, types=types))
    return {
        name: dequantize(quantize(values, types[name]), types[name]) if name in types else values
        for name, values in weights.items()
    }


def test_converted_files_are_held_while_the_model_is_open(path: Path, home: Path) -> None:
    source = open_source(path, need_weights=True)
    store = ContentStore(home / "gguf")
    assert store.drop(source.folder) == IN_USE
    folder, source = source.folder, None
    gc.collect()
    assert store.drop(folder) == "" and list(store.root.iterdir()) == []


def test_a_float_file_opens_as_the_folder_would(path: Path, home: Path) -> None:
    source = open_source(path, need_weights=True)
    assert source.name == source.spec.name == "tiny"
    assert source.spec.parameters == sum(values.size for values in files.random_tensors(LLAMA).values())
    assert (source.weights, source.has_weights, source.quantised_as) == (path, True, None)
    assert source.spec.eos_ids == (2, 0)
    assert source.folder.parent == home / "gguf"
    assert {item.name for item in source.folder.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert source.config_sha256 == hashlib.sha256((source.folder / "config.json").read_bytes()).hexdigest()
    assert {item.name for item in source.tokenizer_files} == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip


def test_companions_are_written_once_and_belong_to_the_header(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_source(path)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_source, "tokenizer_files", lambda *_: pytest.fail("converted again"))
        assert open_source(path).folder == first.folder
        moved = path.rename(tmp_path / "moved.gguf")
        assert open_source(moved).folder == first.folder
        assert open_source(moved).name == "moved"
    config = files.model_file(LLAMA, files.random_tensors(LLAMA), extra={"general.name": Value(STRING, "Another")})
    (tmp_path / "other.gguf").write_bytes(config)
    assert open_source(tmp_path / "other.gguf").folder != first.folder


def test_rope_factors_in_tensors_count_as_part_of_the_header(tmp_path: Path) -> None:
    """The same header with other factors is another config."""
    found = []
    for last in (2.0, 3.0):
        factors = Stored(0, (8,), np.array([1.0] * 7 + [last], "<f4").tobytes())
        path = tmp_path / f"{last}.gguf"
        path.write_bytes(files.model_file(LLAMA, files.random_tensors(LLAMA), more={"rope_freqs.weight": factors}))
        found.append(open_source(path).spec.ropes["default"].long_factor[-1])
    assert found == [2.0, 3.0]


def test_concurrent_conversions_write_one_complete_folder(path: Path, home: Path) -> None:
    sources: list[Path] = []
    threads = [threading.Thread(target=lambda: sources.append(open_source(path).folder)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sources) == 4
    assert {item.name for item in (home / "gguf").iterdir()} == {sources[0].name}, "no half-written folder stays"


def test_a_failed_conversion_leaves_no_folder(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "tiny.gguf"
    data = files.model_file(LLAMA, files.random_tensors(LLAMA), extra={"tokenizer.ggml.pre": Value(STRING, "bloom")})
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(Unsupported, match="'bloom' is a way to split text"):
            open_source(path)
    assert list((home / "gguf").iterdir()) == []


def test_weights_must_agree_with_the_metadata(tmp_path: Path) -> None:
    weights = files.random_tensors(LLAMA)
    path = tmp_path / "tiny.gguf"
    part = {name: values for name, values in weights.items() if "layers.2.mlp.up_proj" not in name}
    path.write_bytes(files.model_file(LLAMA, part))
    with pytest.raises(InvalidInput, match=r"missing: model\.layers\.2\.mlp\.up_proj\.weight"):
        open_source(path)
    changed = weights | {"model.layers.1.mlp.up_proj.weight": np.zeros((64, 64), np.float32)}
    path.write_bytes(files.model_file(LLAMA, changed))
    with pytest.raises(InvalidInput, match=r"wrong shape: model\.layers\.1\.mlp\.up_proj\.weight is \[64, 64\]"):
        open_source(path)


def test_a_damaged_file_is_refused_with_its_name(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match=r"tiny\.gguf: tensor .* is it complete\?"):
        open_source(path)
    with pytest.raises(InvalidInput, match=r"a Hugging Face folder, a \.gguf file, a hub id"):
        open_source(path.with_name("absent.gguf"))


def test_a_split_model_opens_by_its_first_part(tmp_path: Path) -> None:
    weights = files.random_tensors(LLAMA)
    names = list(weights)
    metadata = files.metadata_of("llama", LLAMA)
    for number, part in enumerate((names[:10], names[10:])):
        keys = {"split.no": Value(U16, number), "split.count": Value(U16, 2)}
        extra = {**keys, **({} if number else metadata)}
        data = files.model_file(LLAMA, {name: weights[name] for name in part}, metadata=extra)
        (tmp_path / f"tiny-{number + 1:05d}-of-00002.gguf").write_bytes(data)
    source = open_source(tmp_path / "tiny-00001-of-00002.gguf")
    assert source.name == "tiny"
    with open_tensors(source.weights) as tensors:
        assert len(tensors.files) == 2
        for name, values in weights.items():
            assert np.array_equal(tensors.floats(name), values)


def test_plans_of_a_quantised_file_say_that_it_is_rounded_twice(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    expected = write_quantised(path)
    source = open_source(path)
    assert source.quantised_as == "Q4_0, Q8_0"
    with open_tensors(source.weights) as tensors:
        for name, values in expected.items():
            assert np.array_equal(tensors.floats(name), values), name
    (plan,) = make_plans(str(path), [DEVICE], PlanRequest(recipe=named_recipe("s8"), context=64))
    assert plan.quantised_as == "Q4_0, Q8_0"
    assert TWICE.format("Q4_0, Q8_0") in plan.notes
    shown = CliRunner().invoke(command, ["plan", str(path), "--device", DEVICE, "--context", "64", "--recipe", "s8"])
    assert TWICE.format("Q4_0, Q8_0") in " ".join(shown.output.split())


def test_plans_of_a_float_file_have_no_such_note(path: Path) -> None:
    (plan,) = make_plans(str(path), [DEVICE], PlanRequest(recipe=named_recipe("s8"), context=64))
    assert plan.quantised_as is None
    assert not [note for note in plan.notes if "source" in note]


def test_inspect_shows_what_a_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_quantised(path)
    shown = CliRunner().invoke(command, ["inspect", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "tiny (llama), " in shown.stdout
    assert "its own integers (Q4_0, groups of 32; Q8_0, groups of 32) are kept" in " ".join(shown.stdout.split())
    facts = json.loads(CliRunner().invoke(command, ["inspect", str(path), "--json"]).stdout)
    assert facts["quantised_as"] == "Q4_0, Q8_0"
    assert facts["files"] == {"tiny.gguf": path.stat().st_size}
    (head,) = [row for row in facts["tensors"] if row["tensor"] == "model.embed_tokens.weight"]
    assert (head["type"], head["shape"]) == ("Q8_0", [320, 64])
    refused = CliRunner().invoke(command, ["inspect", str(path), "--verify"])
    assert isinstance(refused.exception, InvalidInput)


@pytest.mark.quantize
def test_neutral_weights_of_a_file_are_those_of_its_values(tmp_path: Path) -> None:
    """Float weights pass through to the bit, integers are those of a folder with the same values."""
    pytest.importorskip("torch")
    from edgekit.quant.pipeline import neutral_weights

    path = tmp_path / "tiny.gguf"
    expected = write_quantised(path)
    floats = neutral_weights(open_source(path, need_weights=True), named_recipe("float32"))
    for name, values in expected.items():
        assert np.array_equal(floats.tensor(name), values), name
    assert floats.manifest.source_files["tiny.gguf"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert floats.manifest.notes == (EXACT.format("Q4_0, Q8_0"),)
    rounded = neutral_weights(path, named_recipe("s8"))
    folder = _as_folder(tmp_path / "folder", open_source(path).folder, expected)
    same = neutral_weights(folder, named_recipe("s8"))
    assert rounded.manifest.weights_sha256 == same.manifest.weights_sha256
    assert same.manifest.notes == ()


def _as_folder(folder: Path, companions: Path, weights: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    for item in companions.iterdir():
        (folder / item.name).write_bytes(item.read_bytes())
    write_tensors(folder, weights)
    return folder


@pytest.mark.quantize
@pytest.mark.onnx
def test_a_file_becomes_an_artifact_that_answers(tmp_path: Path) -> None:
    for name in ("torch", "onnxruntime", "onnx_ir"):
        pytest.importorskip(name)
    import edgekit
    from edgekit import OpenOptions
    from edgekit.apps.bench.artifact_subjects import subject_of_artifact
    from edgekit.artifact.artifact import read_manifest
    from edgekit.artifact.export import export

    path = tmp_path / "tiny.gguf"
    write_quantised(path)
    (plan,) = make_plans(str(path), [DEVICE], PlanRequest(recipe=named_recipe("s8"), context=64, target="onnx"))
    artifact = export(plan, tmp_path / "artifact")
    assert TWICE.format("Q4_0, Q8_0") in read_manifest(artifact.folder).plan.notes
    assert subject_of_artifact(artifact.folder, OpenOptions()).opening["notes"] == [TWICE.format("Q4_0, Q8_0")]
    shown = CliRunner().invoke(command, ["inspect", str(artifact.folder)])
    assert "rounded twice" in shown.stdout
    with edgekit.open(artifact.folder) as runtime:
        assert len(runtime.generate("the in", max_tokens=5, ignore_eos=True).tokens) == 5


@pytest.mark.quantize
@pytest.mark.onnx
def test_an_evaluation_names_the_quantised_reference(tmp_path: Path) -> None:
    for name in ("torch", "onnxruntime", "onnx_ir"):
        pytest.importorskip(name)
    from edgekit.apps.bench.eval.evaluate import evaluate
    from edgekit.artifact.export import export
    from edgekit.common.progress import no_progress

    path = tmp_path / "tiny.gguf"
    write_quantised(path)
    (plan,) = make_plans(str(path), [DEVICE], PlanRequest(recipe=named_recipe("float32"), context=64, target="onnx"))
    artifact = export(plan, tmp_path / "artifact")
    text = tmp_path / "text.txt"
    text.write_text("the rain in the tin " * 60)
    found = evaluate(artifact.folder, text=text, tokens=100, window_tokens=32, progress=no_progress)
    assert found.reference == "tiny, Q4_0, Q8_0 as float"
    assert found.notes == (EXACT.format("Q4_0, Q8_0"),)
    assert found.divergence is not None
    assert found.divergence.kl_mean < 1e-6


def with_head(path: Path, table: str, head: np.ndarray, kind: str) -> np.ndarray:
    """Write a tied model with a head next to its table; return the table's values."""
    weights = files.random_tensors(LLAMA)
    types = {"model.embed_tokens.weight": Type[table]}
    more = {"output.weight": Stored(int(Type[kind]), head.shape, quantize(head, Type[kind]).tobytes())}
    path.write_bytes(files.model_file(LLAMA, weights, types=types, more=more))
    return weights["model.embed_tokens.weight"]


@pytest.mark.parametrize(("table", "head", "kept"), [("Q4_0", "Q8_0", "Q8_0"), ("Q8_0", "Q4_0", "Q8_0")])
def test_of_two_tables_that_are_equal_up_to_rounding_the_finer_one_stays(
    table: str, head: str, kept: str, tmp_path: Path
) -> None:
    path, values = tmp_path / "tied.gguf", files.random_tensors(LLAMA)["model.embed_tokens.weight"]
    with_head(path, table, values, head)
    source = open_source(path)
    assert source.spec.tied and source.spec.parameters == sum(v.size for v in files.random_tensors(LLAMA).values())
    left_out = "token_embd.weight" if kept == head else "output.weight"
    assert source.notes == (f"{left_out} is left out: it is the other table of tokens up to rounding",)
    (plan,) = make_plans(source, [DEVICE], PlanRequest(context=64))
    assert source.notes[0] in plan.notes
    with open_tensors(path) as tensors:
        assert tensors.entry("model.embed_tokens.weight").dtype == kept and "lm_head.weight" not in tensors.entries
        found = tensors.floats("model.embed_tokens.weight")
    assert np.array_equal(found, dequantize(quantize(values, Type[kept]), Type[kept]))


def test_another_head_stays(tmp_path: Path) -> None:
    other = np.random.default_rng(9).standard_normal((files.VOCABULARY, 64)).astype(np.float32)
    with_head(tmp_path / "untied.gguf", "Q8_0", other, "Q8_0")
    source = open_source(tmp_path / "untied.gguf")
    assert not source.spec.tied and source.notes == ()
