"""Specs equal transformers' models of the same config: parameters, names, shapes, windows, ropes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import (
    GEMMA_3_1B,
    LLAMA_32_1B,
    MISTRAL_7B,
    PHI_3_MINI,
    PHI_4_MINI,
    PUBLISHED,
    SMALL,
    TINY,
    Config,
)
from pydantic import ValidationError
from shapes import spec_of

from edgekit.errors import InvalidInput, Unsupported
from edgekit.model.families import with_generation
from edgekit.model.source import open_source, open_tensors
from edgekit.model.spec import ModelSpec

PLANNED_ONLY = ("gemma3n_text", "gemma4_text with experts")


def theirs(config: Config) -> Any:
    """transformers' own config of the same file."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.for_model(**copy.deepcopy(config))


def model_of(config: Config, device: str) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(theirs(config))


@pytest.mark.quantize
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_shapes_are_counted_exactly(name: str) -> None:
    """As published and as transformers saves them, which includes a config that numbers layers as 00, 01, ... 29."""
    model, saved = model_of(PUBLISHED[name], "meta"), json.loads(theirs(PUBLISHED[name]).to_json_string(use_diff=False))
    for config in (PUBLISHED[name], saved):
        assert spec_of(config).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.quantize
@pytest.mark.parametrize("name", TINY)
def test_names_and_shapes_are_those_that_transformers_writes(name: str, tmp_path: Path) -> None:
    model = model_of(TINY[name], "cpu")
    model.save_pretrained(tmp_path)
    with open_tensors(tmp_path) as stored:  # stacks of experts are taken apart
        written = {key: entry.shape for key, entry in stored.entries.items()}
    for config in (TINY[name], json.loads((tmp_path / "config.json").read_text())):
        spec = spec_of(config)
        assert {tensor.name: tensor.shape for tensor in spec.tensors()} == written
        assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.quantize
@pytest.mark.parametrize("name", TINY)
def test_configs_saved_by_transformers_give_the_same_spec(name: str) -> None:
    saved = json.loads(theirs(TINY[name]).to_json_string(use_diff=False))
    assert spec_of(saved) == spec_of(TINY[name])


# What real files say about more than the model: it stands in no family's code.
BESIDE: Config = {
    "_name_or_path": "/home/somebody/model", "architectures": ["ForCausalLM"], "transformers_version": "4.54.0",
    "torch_dtype": "bfloat16", "use_cache": False, "initializer_range": 0.02, "attention_dropout": 0.0,
    "pretraining_tp": 1, "unsloth_fixed": True, "rope_interleaved": False, "use_mrope": False, "id2label": {"0": "a"},
    "transformers.js_config": {"dtype": {"q4": "q4"}}, "pruned_heads": {}, "temperature": 0.6, "max_length": 20,
    "matryoshka_dimensions": [16], "auto_map": {"AutoConfig": "a.B"}, "a_field_that_is_null": None,
}  # fmt: skip


@pytest.mark.parametrize("name", TINY)
def test_a_field_that_could_change_the_model_is_refused(name: str) -> None:
    config = TINY[name]
    assert spec_of(config | BESIDE) == spec_of(config)
    for field, value in (("clip_qkv", 8.0), ("rope_interleaved", True), ("rope_ratio", 2)):
        with pytest.raises(Unsupported, match=f"^config.json: {field}: {value} is not a known field of"):
            spec_of(config | {field: value})


def test_layer_types_of_a_plain_model_are_accepted() -> None:
    config = SMALL | {"model_type": "llama"}
    layers = spec_of(config).layers
    assert spec_of(config | {"layer_types": ["full_attention"] * len(layers)}) == spec_of(config)
    for kinds in (["full_attention", "sliding_attention"], [{}], "full_attention"):
        with pytest.raises(Unsupported, match=r"layer_types: .* is not a known field of llama"):
            spec_of(config | {"layer_types": kinds})


def test_unknown_fields_inside_ropes_and_wrapped_models_are_refused() -> None:
    config = SMALL | {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 0.1}}
    with pytest.raises(Unsupported, match=r"rope_scaling.beta: 0.1 is not a known field of llama"):
        spec_of(config)
    wrapped = {"model_type": "gemma3", "vision_config": {"a": 1}, "image_token_index": 7, "text_config": TINY["gemma3"]}
    assert spec_of(wrapped).prefix == "language_model.model."
    for changes, field in (
        ({"text_config": TINY["gemma3"] | {"clip_qkv": 8}}, "text_config.clip_qkv"),
        ({"soft_tokens": 8}, "soft_tokens"),
        ({"text_config": TINY["gemma3"] | {"vision_config": {"a": 1}}}, "text_config.vision_config"),
    ):
        with pytest.raises(Unsupported, match=rf"{field}: .* is not a known field of gemma3_text"):
            spec_of(wrapped | changes)


@pytest.mark.quantize
@pytest.mark.parametrize("name", TINY)
def test_windows_are_those_that_transformers_derives(name: str) -> None:
    config, spec = theirs(TINY[name]), spec_of(TINY[name])
    uniform = config.model_type in ("mistral", "mixtral", "phi3", "qwen3_moe")
    kinds = ["sliding_attention"] * 6 if uniform else getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if config.model_type == "smollm3" and not config.use_sliding_window:
        window = None
    derived = [window if kind == "sliding_attention" else None for kind in kinds or ["full_attention"] * 6]
    assert [layer.window for layer in spec.layers] == derived


@pytest.mark.quantize
@pytest.mark.parametrize("name", TINY)
def test_scales_and_switches_are_those_of_the_running_model(name: str) -> None:
    spec, model = spec_of(TINY[name]), model_of(TINY[name], "cpu")
    decoder = model.model
    for layer, module in zip(spec.layers, decoder.layers, strict=True):
        if layer.delta_rule:
            rule, attention = layer.delta_rule, module.linear_attn
            assert (attention.num_k_heads, attention.num_v_heads) == (rule.key_heads, rule.value_heads)
            assert (attention.head_k_dim, attention.head_v_dim) == (rule.key_dim, rule.value_dim)
            assert (attention.conv_kernel_size, attention.conv_dim) == (rule.taps, rule.channels)
            continue
        if layer.conv_taps:
            assert module.conv.conv.kernel_size == (layer.conv_taps,)
            continue
        attention = module.self_attn
        assert attention.scaling == pytest.approx(spec.attention_scale)
        assert attention.head_dim == layer.head_dim
        rotates = spec.family != "exaone4" or attention.sliding_window is None or attention.is_sliding
        rotates = attention.sliding_window is not None if spec.family == "cohere2" else rotates
        assert bool(getattr(attention, "use_rope", rotates)) == (layer.rope is not None)
        assert getattr(attention, "attn_logit_softcapping", None) == spec.attention_softcap
        assert getattr(attention, "is_kv_shared_layer", False) != layer.stores_kv
    embedding_scale = getattr(decoder, "embedding_multiplier", 1.0)
    embedding_scale = getattr(decoder.embed_tokens, "scalar_embed_scale", embedding_scale)
    assert embedding_scale == pytest.approx(spec.embedding_scale)
    assert getattr(model.config, "final_logit_softcapping", None) == spec.logit_softcap
    norm = getattr(decoder, spec.names.last_norm)
    assert norm.weight.shape == (spec.hidden_size,)
    epsilon = getattr(norm, "eps", None) or norm.variance_epsilon
    assert epsilon == spec.norm_epsilon
    assert spec.norm_offset == (spec.family in ("gemma2", "gemma3_text", "qwen3_5_text"))


def test_gemma_4_is_exported_unless_it_attends_both_ways_or_lacks_rows() -> None:
    config = TINY["gemma4"]
    assert spec_of(config).exportable is None
    assert spec_of(config | {"use_bidirectional_attention": "vision"}).exportable is None
    for change, reason in (
        ({"use_bidirectional_attention": "all"}, "looks both ways"),
        ({"vocab_size_per_layer_input": 32}, "fewer per-layer embeddings than tokens"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}, "experts"),
    ):
        assert reason in str(spec_of(config | change).exportable)
    with pytest.raises(Unsupported, match=r"use_bidirectional_attention: 'images' is not supported"):
        spec_of(config | {"use_bidirectional_attention": "images"})


def test_layers_without_keys_and_values_read_those_of_the_last_layer_of_their_kind() -> None:
    spec = spec_of(PUBLISHED["Gemma-4-small"])
    assert [spec.kv_owner(index) for index in (0, 13, 14, 15, 18, 19, 33, 34)] == [0, 13, 14, 13, 13, 14, 13, 14]
    told = json.loads(spec.model_dump_json())
    told["layers"][20]["kv_heads"] = 2
    with pytest.raises(ValidationError, match=r"layers.20.stores_kv: no earlier layer has keys and values"):
        ModelSpec.model_validate_json(json.dumps(told))


@pytest.mark.quantize
def test_a_wrapped_gemma_4_is_its_text_model_with_unused_tensors_beside_it(tmp_path: Path) -> None:
    """Published files hold keys and values of the layers that share them."""
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.numpy")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 8, "model_type": "gemma4_vision"}  # fmt: skip
    config = transformers.Gemma4Config(text_config=dict(TINY["gemma4"]), vision_config=vision, audio_config=None)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    spec = open_source(tmp_path, need_weights=True).spec
    assert spec.prefix == "model.language_model."
    assert {tensor.name for tensor in spec.tensors()} == {name for name in tensors if name.startswith(spec.prefix)}
    like = spec.layers[3]
    extra = np.zeros((like.kv_heads * like.head_dim, spec.hidden_size), np.float32)
    unused = f"{spec.prefix}layers.5.self_attn.k_proj.weight"
    safetensors.save_file({**tensors, unused: extra}, tmp_path / "model.safetensors")
    assert open_source(tmp_path, need_weights=True).spec == spec
    stray = f"{spec.prefix}layers.3.self_attn.g_proj.weight"
    safetensors.save_file({**tensors, stray: extra}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"not in a gemma4_text model: .*g_proj"):
        open_source(tmp_path)


@pytest.mark.quantize
def test_a_wrapped_model_is_its_text_model_under_another_prefix(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors")
    text = TINY["gemma3"]
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}  # fmt: skip
    for tied, head in ((True, None), (False, "language_model.lm_head.weight")):
        config = transformers.Gemma3Config(text_config=dict(text), vision_config=vision, tie_word_embeddings=tied)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        model.save_pretrained(tmp_path)
        with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
            written = {key for key in file.keys() if key.startswith("language_model.")}  # noqa: SIM118
        spec = spec_of(json.loads((tmp_path / "config.json").read_text()))
        assert {tensor.name for tensor in spec.tensors()} == written
        assert (head in written) == (head is not None)
        assert spec.exportable is None


def test_a_wrapped_config_may_omit_family_defaults() -> None:
    published = {
        "model_type": "gemma3", "eos_token_id": [1, 106], "vision_config": {"hidden_size": 1152},
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024},
    }  # fmt: skip
    spec = spec_of(published)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert (spec.tied, spec.eos_ids, spec.prefix) == (True, (1, 106), "language_model.model.")
    assert spec.parameters == 3_880_263_168
    assert (spec.ropes["full"].kind, spec.ropes["full"].factor) == ("linear", 8.0)
    assert (spec.ropes["sliding"].kind, spec.ropes["sliding"].theta) == ("default", 10_000.0)
    assert [index for index, layer in enumerate(spec.layers) if layer.window is None] == [5, 11, 17, 23, 29]


@pytest.mark.parametrize("name", PUBLISHED)
def test_only_dense_families_can_be_exported(name: str) -> None:
    spec = spec_of(PUBLISHED[name])
    kind = f"{spec.family} with experts" if spec.experts else spec.family
    assert (spec.exportable is not None) == (kind in PLANNED_ONLY)


@pytest.mark.parametrize("name", [*PUBLISHED, *TINY])
def test_a_spec_survives_json(name: str) -> None:
    spec = spec_of((PUBLISHED | TINY)[name])
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


SCALINGS: dict[str, Config] = {
    "none": {},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": LLAMA_32_1B["rope_scaling"],
}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_both_spellings_of_a_rope_give_one_spec(model_type: str, scaling: str) -> None:
    shapes = SMALL | {"model_type": model_type}
    older = shapes | {"rope_theta": 5e5, "rope_scaling": SCALINGS[scaling] or None}
    newer = shapes | {"rope_parameters": {"rope_type": "default", **SCALINGS[scaling], "rope_theta": 5e5}}
    oldest = copy.deepcopy(older)
    if oldest["rope_scaling"]:
        oldest["rope_scaling"]["type"] = oldest["rope_scaling"].pop("rope_type")
    assert spec_of(older) == spec_of(newer) == spec_of(older | newer) == spec_of(oldest)
    assert spec_of(older).ropes["default"].theta == 5e5


def test_two_thetas_are_read_in_both_spellings() -> None:
    older = GEMMA_3_1B | {"rope_theta": 2e6, "rope_local_base_freq": 2e4}
    newer = {key: value for key, value in GEMMA_3_1B.items() if not key.startswith("rope")} | {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    assert spec_of(older) == spec_of(newer)
    assert {name: rope.theta for name, rope in spec_of(older).ropes.items()} == {"full": 2e6, "sliding": 2e4}


DISAGREEING: dict[str, Config] = {
    "theta twice": {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "scaling and none": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"},
    },
    "one for each kind of layer": {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "two trained lengths": {
        "original_max_position_embeddings": 128,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DISAGREEING)
def test_ropes_that_contradict_each_other_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"rope|original_max_position_embeddings"):
        spec_of(SMALL | {"model_type": "llama"} | DISAGREEING[name])


def test_exaone4_takes_letters_for_its_windows() -> None:
    spelled = spec_of(TINY["exaone4"] | {"sliding_window_pattern": "LLLG"})
    assert [layer.window for layer in spelled.layers] == [16, 16, 16, None, 16, None]
    assert [layer.rope for layer in spelled.layers] == ["default"] * 3 + [None, "default", None]
    with pytest.raises(InvalidInput, match="letters"):
        spec_of(TINY["exaone4"] | {"sliding_window_pattern": "LLX"})


def test_ministral3_is_offered_within_its_trained_positions() -> None:
    config = TINY["ministral3"]
    assert spec_of(config).max_positions == 64
    steady = {key: value for key, value in config["rope_parameters"].items() if key != "llama_4_scaling_beta"}
    assert spec_of(config | {"rope_parameters": steady}).max_positions == 256


def test_phi_4_rotates_three_quarters_of_a_head() -> None:
    rope = spec_of(PHI_4_MINI).ropes["default"]
    assert (rope.kind, rope.dim, rope.original_positions, rope.factor) == ("longrope", 96, 4096, 32.0)


def test_older_names_of_longrope_are_known() -> None:
    for older in ("su", "yarn", "longrope"):
        scaling = PHI_4_MINI["rope_scaling"] | {"type": older}
        assert spec_of(PHI_4_MINI | {"rope_scaling": scaling}) == spec_of(PHI_4_MINI)


def test_a_window_over_all_positions_becomes_none() -> None:
    assert spec_of(PHI_4_MINI).layers[0].window is None
    assert spec_of(PHI_3_MINI).layers[0].window == 2047


def test_mistral_windows_every_layer_unless_it_is_null() -> None:
    absent = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert {layer.window for layer in spec_of(absent).layers} == {4096}
    assert {layer.window for layer in spec_of(MISTRAL_7B | {"sliding_window": None}).layers} == {None}


def test_mistral_with_mixed_layers_is_planned_by_them_and_not_exported() -> None:
    mixed = spec_of(TINY["mistral"] | {"layer_types": ["sliding_attention", "full_attention"] * 3})
    assert [layer.window for layer in mixed.layers] == [16, None] * 3
    assert mixed.exportable is not None
    assert "ministral" in mixed.exportable


def test_eos_ids_may_be_one_a_list_or_from_the_generation_config() -> None:
    config = SMALL | {"model_type": "llama"}
    assert spec_of(config | {"eos_token_id": 3}).eos_ids == (3,)
    assert spec_of(config | {"eos_token_id": [3, 4, 3]}).eos_ids == (3, 4)
    assert spec_of(config | {"eos_token_id": [3, 64, 9999]}).eos_ids == (3,)
    assert spec_of(config | {"eos_token_id": None}).eos_ids == ()
    spec = spec_of(config | {"eos_token_id": 3})
    assert with_generation(spec, {"eos_token_id": [5, 6]}, "generation_config.json").eos_ids == (5, 6)
    assert with_generation(spec, {}, "generation_config.json") == spec
    with pytest.raises(InvalidInput, match=r"generation_config.json: eos_token_id: 'x'"):
        with_generation(spec, {"eos_token_id": "x"}, "generation_config.json")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"conv_dilation": 2}, "conv_dilation: 2 is not a known field of lfm2"),
        ({"conv_dim": 64}, "conv_dim: 64 is not 32"),
        ({"use_pos_enc": False}, "use_pos_enc: False"),
        ({"block_ff_dim": 64}, "block_ff_dim: 64 differs from intermediate_size, 48"),
        ({"layer_types": ["conv"] * 6}, "no layer of attention"),
        ({"conv_L_cache": 1}, "conv_L_cache: 1"),
        ({"layer_types": ["mamba"] * 6}, "mamba"),
    ],
)
def test_lfm2_refuses_fields_that_it_does_not_know(changes: Config, error: str) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=error):
        spec_of(TINY["lfm2"] | changes)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"attn_output_gate": False}, "attn_output_gate: False is not supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type: 'sigmoid' is not supported; only swish"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"linear_num_value_heads": 3}, "is not a multiple of the 2 key heads"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim: 0"),
        ({"layer_types": ["linear_attention"] * 6}, "no layer of attention"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "'mrope' is not supported"),
        ({"linear_gate_rank": 2}, "linear_gate_rank: 2 is not a known field of qwen3_5_text"),
    ],
)
def test_qwen3_5_refuses_other_parts(changes: Config, error: str) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=error):
        spec_of(TINY["qwen3_5"] | changes)


def test_qwen3_5_rotates_a_quarter_of_each_head_by_default() -> None:
    published = PUBLISHED["Qwen3.5-0.8B"]
    rope = spec_of(published).ropes["default"]
    assert (rope.kind, rope.dim, rope.theta) == ("default", 64, 1e7)
    older = {key: value for key, value in published.items() if key != "rope_parameters"}
    assert spec_of(older | {"rope_theta": 1e7}) == spec_of(published)
    assert spec_of(older | {"rope_theta": 1e7, "partial_rotary_factor": 0.5}).ropes["default"].dim == 128
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
    stretched = spec_of(published | {"rope_parameters": published["rope_parameters"] | yarn}).ropes["default"]
    assert (stretched.kind, stretched.dim, stretched.factor) == ("yarn", 64, 4.0)


@pytest.mark.quantize
def test_vision_tower_and_mtp_head_are_ignored(tmp_path: Path) -> None:
    """For Qwen3.5, both in the multimodal model and in a text model."""
    transformers = pytest.importorskip("transformers")
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    text = dict(TINY["qwen3_5"])
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    tensors["mtp.fc.weight"] = torch.zeros(32, 64)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    wrapped = open_source(tmp_path).spec
    assert (wrapped.family, wrapped.prefix, wrapped.tied) == ("qwen3_5_text", "model.language_model.", True)
    assert wrapped.parameters == spec_of(text).parameters
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert open_source(tmp_path).spec.prefix == "model.language_model."
    safetensors.save_file(tensors | {"mlp.fc.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"not in a qwen3_5_text model: mlp\.fc\.weight"):
        open_source(tmp_path)


def test_hunyuan_raises_theta_by_its_alpha_and_refuses_what_it_does_not_compute() -> None:
    config = TINY["hunyuan"]
    rope = spec_of(config).ropes["default"]
    assert (rope.kind, rope.theta) == ("default", pytest.approx(10_000 * 1000 ** (8 / 6)))
    for field, value in (("use_qk_norm", False), ("use_cla", True), ("position_embedding_xdrope", True)):
        with pytest.raises(Unsupported, match=f"^config.json: {field}: {value} is not supported in this family"):
            spec_of(config | {field: value})
    with pytest.raises(InvalidInput, match=r"attention_head_dim: 16 is not the head_dim, 8"):
        spec_of(config | {"attention_head_dim": 16})
    with pytest.raises(Unsupported, match=r"rope_scaling.alpha: 1000.0 is not a known field"):
        spec_of(TINY["llama"] | {"rope_scaling": config["rope_scaling"]})
