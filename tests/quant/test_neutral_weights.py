"""Neutral weights keep their format's promises, and transformers with compressed-tensors reads the same numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
import torch
import transformers
from hypothesis import given, settings, strategies as st
from manifests import change_manifest

from edgekit.apps.handover.served_models import handover
from edgekit.common.content_store import ContentStore
from edgekit.common.files import file_sha256
from edgekit.contracts.neutral import MANIFEST, MIN_SCALE, NeutralWeights
from edgekit.contracts.recipe import Format, Recipe, Rule, bits_per_weight, named_recipe
from edgekit.errors import DamagedArtifact, InvalidInput, OutOfSpace, Unsupported
from edgekit.formats.int_packing import bf16_to_float32, float32_to_bf16
from edgekit.formats.safetensors import TensorFolder
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.source import open_source
from edgekit.quant import pipeline as quantise, reference_decoder as decoder
from edgekit.quant.hf_config import neutral_config
from edgekit.quant.pipeline import neutral_weights
from edgekit.quant.rtn import round_rows, round_to_nearest

pytestmark = pytest.mark.quantize

OPENED_BY_TRANSFORMERS = ["llama", "llama untied, with biases", "qwen2", "qwen3", "phi3", "gemma3", "gemma4"]


def made(folder: Path, family: str = "llama", recipe: Recipe | str = "s4-g32", **options: Any) -> NeutralWeights:
    kind, config = models.EVERY[family]
    models.write_model(folder / "model", kind, config)
    chosen = named_recipe(recipe) if isinstance(recipe, str) else recipe
    return neutral_weights(folder / "model", chosen, store=ContentStore(folder / "store"), **options)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    groups=st.integers(1, 4),
    group=st.sampled_from([32, 64, 128, None]),
    size=st.floats(-30, 9),  # times an outlier of 50: still within fp16's scales
    seed=st.integers(0, 1000),
    special=st.sampled_from(["", "zeros", "one value", "outlier", "one sign"]),
)
def test_every_scale_is_positive_exact_in_bfloat16_and_fp16_and_never_tiny(
    rows: int, groups: int, group: int | None, size: float, seed: int, special: str
) -> None:
    inputs = groups * (group or 40)
    weights = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) * 2.0**size
    if special == "zeros":
        weights[:] = 0
    elif special == "one value":
        weights[:, 1:] = 0
    elif special == "outlier":
        weights[:, 0] *= 50
    elif special == "one sign":
        weights.abs_().neg_()
    stored = Format(kind="s4", group=group) if group else Format(kind="s8")
    low, high = (-8, 7) if group else (-128, 127)
    arrays = (torch.from_numpy(part) for part in round_rows(weights.numpy(), stored)[:2])
    for integers, scales in (round_to_nearest(weights, stored), arrays):
        assert scales.shape == (rows, groups if group else 1)
        assert (scales >= MIN_SCALE).all()
        assert (scales == scales.bfloat16().float()).all()
        assert (scales == scales.half().float()).all()
        assert integers.min() >= low
        assert integers.max() <= high


@pytest.mark.parametrize("recipe", ["s4-g32", "s8", "float16"])
def test_rounding_needs_no_torch_and_gives_the_same_bytes(recipe: str, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; sys.modules['torch'] = None\n"
        "from edgekit.common.content_store import ContentStore\n"
        "from edgekit.contracts.recipe import named_recipe\n"
        "from edgekit.model.source import open_source\n"
        "from edgekit.quant.pipeline import neutral_weights\n"
        "source, recipe, store = open_source(sys.argv[1]), named_recipe(sys.argv[2]), ContentStore(Path(sys.argv[3]))\n"
        "weights = neutral_weights(source, recipe, store=store)\n"
        "print(weights.folder)\n"
    )
    weights = made(tmp_path, "llama untied, with biases", recipe)
    words = [sys.executable, "-c", script, str(tmp_path / "model"), recipe, str(tmp_path / "other")]
    other = Path(subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip())
    shards = sorted(weights.folder.glob("*.safetensors"))
    assert shards and [path.read_bytes() for path in shards] == [(other / path.name).read_bytes() for path in shards]


def test_the_scale_search_is_never_worse_than_no_search() -> None:
    weights = torch.randn(64, 256) * 0.02
    for group in (32, 128):
        integers, scales = round_to_nearest(weights, Format(kind="s4", group=group))
        values = (integers.float().reshape(64, -1, group) * scales[:, :, None]).reshape(64, 256)
        plain = weights.reshape(64, -1, group)
        scale = (plain.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
        simple = ((plain / scale).round().clamp(-8, 7) * scale).reshape(64, 256)
        assert (values - weights).square().sum() < 0.9 * (simple - weights).square().sum()


def test_all_accessors_return_the_same_weights(tmp_path: Path) -> None:
    weights = made(tmp_path, "llama untied, with biases", "s4-g64")
    assert weights.modules()[0] == "model.embed_tokens"
    assert weights.modules()[-1] == "lm_head"
    for module in weights.modules():
        stored, (outputs, inputs) = weights.format_of(module), weights.tensor_of(module).shape
        integers, scales, packed = weights.integers(module), weights.scales(module), weights.packed(module)
        assert integers.shape == (outputs, inputs)
        assert scales.shape == (outputs, 1 if stored.kind == "s8" else inputs // (stored.group or 0))
        assert packed.shape == (outputs, inputs if stored.kind == "s8" else inputs // 2)
        assert not packed.flags.writeable
        place = weights.place(f"{module}.weight_packed")
        raw = place.path.read_bytes()[place.offset : place.offset + place.length]
        assert raw == packed.tobytes()
        values = (integers.reshape(*scales.shape, -1) * scales[:, :, None]).reshape(outputs, inputs)
        assert (weights.dequantised(module) == values).all()
        assert (weights.dequantised(module, slice(3, 9)) == values[3:9]).all()
        assert (weights.integers(module, slice(3, 9)) == integers[3:9]).all()
        assert (weights.tensor(f"{module}.weight") == values).all()
    original = TensorFolder.open(tmp_path / "model")
    for name in ("model.norm.weight", "model.layers.1.self_attn.q_proj.bias"):
        np.testing.assert_allclose(weights.floats(name), original.floats(name), rtol=1e-3, atol=1e-6)
    with pytest.raises(InvalidInput, match="no module 'nothing'"):
        weights.scales("nothing")


def test_the_bytes_are_those_that_the_recipe_predicts(tmp_path: Path) -> None:
    weights = made(tmp_path, "qwen2", "s4-g32")
    stored = TensorFolder.open(weights.folder)
    shapes = sum(entry.bytes for name, entry in stored.entries.items() if name.endswith(".weight_shape"))
    total = sum(entry.bytes for entry in stored.entries.values())
    assert total - shapes == bits_per_weight(weights.model, weights.recipe) * weights.model.parameters / 8


def test_rows_that_are_no_multiple_of_a_group_fall_back(tmp_path: Path) -> None:
    config = {**models.SMALL, "hidden_size": 80, "intermediate_size": 90, "num_attention_heads": 2, "head_dim": 48}
    models.write_model(tmp_path / "model", "llama", config)
    weights = neutral_weights(tmp_path / "model", named_recipe("s4-g128"), store=ContentStore(tmp_path / "store"))
    assert str(weights.format_of("model.layers.0.self_attn.o_proj")) == "s4-g32"
    assert str(weights.format_of("model.layers.0.mlp.down_proj")) == "s8"
    weights.verify()
    assert weights.packed("model.layers.0.mlp.down_proj").shape == (80, 90)
    NeutralWeights.open(weights.folder, verify=True)


def opened_with_equal_logits(weights: NeutralWeights) -> Any:
    """Open a handover with transformers, and compare its logits with the reference's; return the model."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        weights.folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = list(models.tokens_of(40))
    expected = decoder.logits(weights.model, lambda name: torch.from_numpy(weights.tensor(name)), tokens).numpy()
    found = models.logits_of(theirs.eval(), tokens)
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-5
    return theirs


@pytest.mark.parametrize("family", OPENED_BY_TRANSFORMERS)
def test_transformers_opens_a_handover_with_equal_logits(tmp_path: Path, family: str) -> None:
    pytest.importorskip("compressed_tensors")
    weights = made(tmp_path, family, handover(named_recipe("s4-g64")))
    opened_with_equal_logits(weights)


def test_transformers_opens_mixed_formats_with_a_quantised_head(tmp_path: Path) -> None:
    """An eight-bit head is a linear like any other; only the embedding has to stay in float."""
    pytest.importorskip("compressed_tensors")
    rules = (
        Rule(pattern="*embed_tokens*", format=Format(kind="float16")),
        Rule(pattern="lm_head", format=Format(kind="s8")),
        Rule(pattern="*.1.mlp.down_proj", format=Format(kind="s8")),
        Rule(pattern="*.self_attn.*", format=Format(kind="s4", group=32)),
        Rule(pattern="*", format=Format(kind="s4", group=64)),
    )
    weights = made(tmp_path, "llama untied, with biases", Recipe(name="five rules", rules=rules))
    opened_with_equal_logits(weights)


def test_transformers_cannot_open_a_quantised_embedding(tmp_path: Path) -> None:
    """If this fails, servers may get the embedding in integers, too: update the documentation, which says so."""
    pytest.importorskip("compressed_tensors")
    weights = made(tmp_path)
    with pytest.raises(AttributeError, match="weight"):
        transformers.AutoModelForCausalLM.from_pretrained(weights.folder, dtype=torch.float32)


def test_the_config_carries_both_rope_spellings_and_no_code(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["gemma3"]
    models.write_model(tmp_path / "model", kind, config)
    place = tmp_path / "model" / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"auto_map": {"AutoModel": "evil.Model"}}))
    (tmp_path / "model" / "evil.py").write_text("raise SystemExit('imported')")
    weights = neutral_weights(tmp_path / "model", named_recipe("s8"), store=ContentStore(tmp_path / "store"))
    found = json.loads((weights.folder / "config.json").read_text())
    assert "auto_map" not in found
    assert not (weights.folder / "evil.py").exists()
    assert found["rope_theta"] == 1000000.0
    assert found["rope_local_base_freq"] == 10000.0
    assert found["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    again = open_source(weights.folder).spec
    assert again.exportable is None
    assert again.ropes == weights.model.ropes


def test_the_config_names_the_type_of_the_stored_floats_where_the_source_is_float32(tmp_path: Path) -> None:
    source = open_source(made(tmp_path).folder).spec
    for named, stored in (("float32", "float16"), ("bfloat16", "bfloat16")):
        assert neutral_config({"dtype": named}, source, named_recipe("s4-g32"))["dtype"] == stored
    assert neutral_config({"dtype": "float32"}, source, named_recipe("float32"))["dtype"] == "float32"


def test_tokenizer_and_template_are_copied_byte_for_byte(tmp_path: Path) -> None:
    source = open_source("demo", need_weights=True)
    weights = neutral_weights(source, named_recipe("s8"), store=ContentStore(tmp_path))
    for path in source.tokenizer_files:
        assert (weights.folder / path.name).read_bytes() == path.read_bytes()
    assert weights.manifest.source_files["tokenizer.json"] == file_sha256(source.folder / "tokenizer.json")


def rewrite(folder: Path, name: str, change: Any) -> None:
    """Change one tensor and make the manifest agree, as an attacker would."""
    tensors = TensorFolder.open(folder)
    path = tensors.place(name).path
    held = TensorFolder.open(path)
    arrays = {each: (entry.dtype, np.array(held.array(each))) for each, entry in held.entries.items()}
    arrays[name] = (arrays[name][0], change(arrays[name][1]))
    with TensorWriter(path, {each: (dtype, array.shape) for each, (dtype, array) in arrays.items()}) as writer:
        for each, (_, array) in arrays.items():
            writer.write(each, array)
        writer.seal()
    fact = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    change_manifest(folder / MANIFEST, lambda manifest: manifest["files"].update({path.name: fact}))


def test_a_disk_without_room_is_refused_before_the_first_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    monkeypatch.setattr(quantise, "free_bytes", lambda path: 1000)
    with pytest.raises(OutOfSpace) as caught:
        neutral_weights(tmp_path / "model", named_recipe("s4-g32"), store=ContentStore(tmp_path / "store"))
    assert 50_000 < caught.value.needed_bytes < 500_000
    assert not list((tmp_path / "store").rglob("*.safetensors"))


def test_text_model_of_a_vision_checkpoint_is_handed_over_alone(tmp_path: Path) -> None:
    """Names and config are as transformers writes them for a vision model, whose vision tensors are left out."""
    pytest.importorskip("compressed_tensors")
    kind, config = models.FAMILIES["gemma3"]
    models.write_model(tmp_path / "text", kind, config)
    text, plain = json.loads((tmp_path / "text" / "config.json").read_text()), TensorFolder.open(tmp_path / "text")
    wrapped = tmp_path / "wrapped"
    wrapped.mkdir()
    (wrapped / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "tie_word_embeddings": True, "vision_config": {}})
    )
    arrays = {f"language_model.{name}": plain.floats(name) for name in plain.entries}
    arrays["vision_tower.patch.weight"] = np.zeros((3, 3), np.float32)
    tensors = {name: ("F32", array.shape) for name, array in arrays.items()}
    with TensorWriter(wrapped / "model.safetensors", tensors) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
        writer.seal()
    weights = neutral_weights(wrapped, handover(named_recipe("s4-g64")), store=ContentStore(tmp_path / "store"))
    assert weights.modules()[0] == "language_model.model.embed_tokens"
    assert weights.scales("language_model.model.layers.0.mlp.up_proj").shape == (128, 1)
    stored = TensorFolder.open(weights.folder)
    assert "model.layers.0.mlp.up_proj.weight_packed" in stored.entries
    assert not [name for name in stored.entries if "vision" in name]
    assert type(opened_with_equal_logits(weights)).__name__ == "Gemma3ForCausalLM"


SCALES = "model.layers.1.mlp.up_proj.weight_scale"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.01, 2.0**-18, 1e30])
def test_a_scale_out_of_range_is_refused_with_tensor_and_place(tmp_path: Path, value: float) -> None:
    weights = made(tmp_path)
    folder = tmp_path / "copy"
    shutil.copytree(weights.folder, folder)

    def spoil(scales: Any) -> Any:
        scales[3, 1] = float32_to_bf16(np.array([value], np.float32))[0]
        return scales

    rewrite(folder, SCALES, spoil)
    for look in (
        lambda: NeutralWeights.open(folder, verify=True),
        lambda: NeutralWeights.open(folder).scales("model.layers.1.mlp.up_proj"),
        lambda: NeutralWeights.open(folder).dequantised("model.layers.1.mlp.up_proj"),
    ):
        with pytest.raises(InvalidInput, match=rf"{SCALES}.*at \[3, 1\]"):
            look()


def test_a_tensor_of_another_shape_or_type_is_refused(tmp_path: Path) -> None:
    weights = made(tmp_path)
    for number, change in enumerate((lambda scales: scales[:-1], lambda scales: bf16_to_float32(scales))):
        folder = tmp_path / f"copy{number}"
        shutil.copytree(weights.folder, folder)
        if number == 0:
            rewrite(folder, SCALES, change)
        else:
            rewrite(folder, SCALES, lambda scales: scales.reshape(-1))
        with pytest.raises(InvalidInput, match=SCALES):
            NeutralWeights.open(folder)


def test_damage_is_found_by_size_at_once_and_by_hash_when_asked(tmp_path: Path) -> None:
    weights = made(tmp_path)
    shard = sorted(weights.folder.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    NeutralWeights.open(weights.folder)
    with pytest.raises(DamagedArtifact, match=shard.name):
        NeutralWeights.open(weights.folder, verify=True)
    shard.write_bytes(bytes(data[:-1]))
    with pytest.raises(DamagedArtifact, match=shard.name):
        NeutralWeights.open(weights.folder)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b.safetensors"])
def test_a_manifest_may_only_name_files_of_its_folder(tmp_path: Path, name: str) -> None:
    weights = made(tmp_path)
    place = weights.folder / MANIFEST
    change_manifest(place, lambda manifest: manifest["files"].update({name: {"bytes": 1, "sha256": "0" * 64}}))
    with pytest.raises(InvalidInput, match=r"files\..*should match pattern"):
        NeutralWeights.open(weights.folder)


def test_weights_that_cannot_be_stored_are_refused_by_name(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["llama"]
    for value in (float("nan"), float("inf")):
        for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
            models.write_model(tmp_path / "model", kind, config)
            stored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
            parameters = dict(stored.named_parameters())
            with torch.no_grad():
                parameters[name].view(-1)[-1] = value
            stored.save_pretrained(tmp_path / "model")
            with pytest.raises(InvalidInput, match=name):
                neutral_weights(tmp_path / "model", named_recipe("s4-g32"), store=ContentStore(tmp_path / "store"))


def test_foreign_formats_are_refused(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    native = Recipe(name="mx", rules=(Rule(pattern="*", format=Format(kind="mxfp4")),))
    with pytest.raises(Unsupported, match="vendor's own"):
        neutral_weights(tmp_path / "model", native, store=ContentStore(tmp_path / "store"))


def test_store_finds_weights_and_repairs_damaged_ones(tmp_path: Path) -> None:
    first = made(tmp_path)
    stamp = (first.folder / MANIFEST).stat().st_mtime_ns
    again = neutral_weights(tmp_path / "model", named_recipe("s4-g32"), store=ContentStore(tmp_path / "store"))
    assert again.folder == first.folder
    assert (again.folder / MANIFEST).stat().st_mtime_ns == stamp
    shard = sorted(first.folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    repaired = neutral_weights(tmp_path / "model", named_recipe("s4-g32"), store=ContentStore(tmp_path / "store"))
    assert repaired.sha256 == first.sha256
    repaired.verify()
    other = neutral_weights(tmp_path / "model", named_recipe("s4-g64"), store=ContentStore(tmp_path / "store"))
    assert other.folder != first.folder
