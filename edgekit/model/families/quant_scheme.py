"""Reads how other tools quantised a model from its `config.json`: compressed-tensors, GPTQ, AWQ, MLX, MXFP4.

Only integers in groups are supported, and MXFP4 for the experts of gpt-oss. Everything else is refused by name: integer
activations, column orders, 8-bit floats, sparsity, and unknown keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edgekit.formats.quant_scheme import QuantScheme, StoredGroups
from edgekit.model.families.fields import Fields

_MAX_GROUPS, _MAX_GROUP, _MAX_MODULES = 1 << 10, 1 << 16, 1 << 16
_BITS = (4, 8)
_FIX = "is not supported; give the float model"

# Keys that change no weight.
_COMPRESSED_NOTES = ("config_groups", "format", "global_compression_ratio", "ignore", "quant_method",
                     "quantization_status", "version")  # fmt: skip
_COMPRESSED_ABSENT = ("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config")
_WEIGHT_NOTES = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder", "observer",
                 "observer_kwargs", "scale_dtype", "zp_dtype")  # fmt: skip
_GPTQ_NOTES = (
    "quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "method", "pack_dtype",
    "lm_head", "meta", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "act_group_aware",
    "hyb_act", "mse", "gptaq", "model_name_or_path", "model_file_base_name", "tokenizer", "dataset", "batch_size",
    "backend", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id",
    "max_input_length", "cache_block_outputs", "modules_in_block_to_quantize", "use_cuda_fp16", "use_exllama",
    "exllama_config", "disable_exllama", "offload_to_disk", "offload_to_disk_path", "pack_impl",
)  # fmt: skip
_GPTQ_ABSENT = ("dynamic", "adapter", "rotation", "is_marlin_format")
_AWQ_NOTES = ("quant_method", "bits", "group_size", "zero_point", "version", "modules_to_not_convert", "backend")
_AWQ_ABSENT = ("do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config")
_MLX_KEYS = ("group_size", "bits", "mode")


def quant_scheme(fields: Fields) -> QuantScheme | None:
    """Return the quantisation stated in a config; None for a float model.

    Raises `Unsupported` for an unsupported one, and `InvalidInput` for invalid values.
    """
    section, of_mlx = fields.section("quantization_config"), fields.section("quantization")
    method = section.get("quant_method") if section is not None else None
    if of_mlx is not None or (section is not None and method is None and section.has("bits")):
        return _mlx(of_mlx or section)  # type: ignore[arg-type]
    if section is None:
        return None
    if method == "compressed-tensors":
        return _compressed(section)
    if method == "gptq":
        return _gptq(section)
    if method == "awq":
        return _awq(section)
    if method == "mxfp4" and fields.get("model_type") == "gpt_oss":  # of other families no such stacks are known
        _refuse_unknown(section, ("quant_method", "modules_to_not_convert"), ("dequantize",))
        return QuantScheme("mxfp4", (StoredGroups(4, 32),))
    raise section.unsupported("quant_method", f"{_FIX}, or one of compressed-tensors, gptq, awq and MLX's affine")


def _compressed(section: Fields) -> QuantScheme:
    _refuse_unknown(section, _COMPRESSED_NOTES, _COMPRESSED_ABSENT)
    outer = section.text("format", "dense")
    if outer not in ("pack-quantized", "mixed-precision"):
        raise section.unsupported("format", f"{_FIX}, or pack-quantized")
    groups = section.section("config_groups")
    if groups is None:
        raise section.missing("config_groups")
    names = groups.names()
    if len(names) > _MAX_GROUPS:
        raise section.refusal("config_groups", f"has more than {_MAX_GROUPS} groups; correct the file")
    found: list[StoredGroups] = []
    symmetric = True
    for name in names:
        group = groups.section(name)
        if group is None:
            raise groups.missing(name)
        _refuse_unknown(group, ("targets", "weights", "format"), ("input_activations", "output_activations"))
        if group.text("format", outer) != "pack-quantized":
            raise group.unsupported("format", f"{_FIX}, or pack-quantized")
        found.append(_compressed_group(group))
        symmetric = symmetric and _weights(group).flag("symmetric", True)
    return QuantScheme("compressed-tensors", tuple(dict.fromkeys(found)), symmetric=symmetric)


def _weights(group: Fields) -> Fields:
    weights = group.section("weights")
    if weights is None:
        raise group.missing("weights")
    return weights


def _compressed_group(group: Fields) -> StoredGroups:
    weights = _weights(group)
    _refuse_unknown(weights, _WEIGHT_NOTES, ("block_structure",))
    if weights.text("type", "int") != "int":
        raise weights.unsupported("type", f"{_FIX}, or integers")
    if weights.get("dynamic") not in (None, False):
        raise weights.unsupported("dynamic", _FIX)
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise weights.unsupported("actorder", f"stores columns in order of activation, which {_FIX}")
    strategy = weights.text("strategy", "channel" if weights.get("group_size") is None else "group")
    bits = _bits(weights, "num_bits")
    if strategy == "channel":
        return StoredGroups(bits, None)
    if strategy != "group":
        raise weights.unsupported("strategy", f"{_FIX}, or group or channel scales")
    return StoredGroups(bits, weights.count("group_size", _MAX_GROUP))


def _gptq(section: Fields) -> QuantScheme:
    _refuse_unknown(section, _GPTQ_NOTES, _GPTQ_ABSENT)
    if section.text("pack_dtype", "int32") != "int32":
        raise section.unsupported("pack_dtype", f"{_FIX}, or int32")
    version = section.text("checkpoint_format", section.text("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise section.unsupported("checkpoint_format", f"{_FIX}, or gptq or gptq_v2")
    bits = _bits(section, "bits")
    size = section.get("group_size")
    group = None if size == -1 else section.count("group_size", _MAX_GROUP)
    # desc_act is allowed, because with static groups the stored order is the natural one; others are refused later.
    symmetric = section.flag("sym", True)
    return QuantScheme("gptq", (StoredGroups(bits, group),), zero_less=int(version == "gptq"), symmetric=symmetric)


def _awq(section: Fields) -> QuantScheme:
    _refuse_unknown(section, _AWQ_NOTES, _AWQ_ABSENT)
    if section.text("version", "gemm").lower() != "gemm":
        raise section.unsupported("version", f"{_FIX}, or gemm")
    bits = _bits(section, "bits")
    if bits != 4:
        raise section.unsupported("bits", f"{_FIX}, or 4 bits")
    group = section.count("group_size", _MAX_GROUP)
    return QuantScheme("awq", (StoredGroups(bits, group),), symmetric=not section.flag("zero_point", True))


def _mlx(section: Fields) -> QuantScheme:
    names = [name for name in section.names() if name not in _MLX_KEYS]
    if len(names) > _MAX_MODULES:
        raise section.refusal(names[0], f"is one of more than {_MAX_MODULES} modules; correct the file")
    modules: dict[str, StoredGroups | None] = {}
    for name in names:
        value = section.get(name)
        if value is True:
            continue
        if value is False:
            modules[name] = None
            continue
        module = section.section(name)
        if module is None:
            raise section.unsupported(name, f"{_FIX}; known are bits with group_size, true and false")
        _refuse_unknown(module, _MLX_KEYS, ())
        modules[name] = _mlx_group(module)
    return QuantScheme("mlx", (_mlx_group(section),), modules, symmetric=False)


def _mlx_group(fields: Fields) -> StoredGroups:
    if fields.text("mode", "affine") != "affine":
        raise fields.unsupported("mode", f"{_FIX}, or affine")
    return StoredGroups(_bits(fields, "bits"), fields.count("group_size", _MAX_GROUP))


def _bits(fields: Fields, name: str) -> int:
    bits = fields.count(name, 64)
    if bits not in _BITS:
        raise fields.unsupported(name, f"{_FIX}, or 4 or 8 bits")
    return bits


def _refuse_unknown(fields: Fields, known: Iterable[str], absent: Iterable[str]) -> None:
    """Refuse unknown keys, and keys of `absent` with a value."""
    for name in fields.names():
        if name in known:
            continue
        if name not in absent:
            raise fields.unsupported(name, f"is unknown and could change the weights, so it {_FIX}")
        if not _is_nothing(fields.get(name)):
            raise fields.unsupported(name, _FIX)


def _is_nothing(value: Any) -> bool:
    """Return True for null, false, empty objects and lists, and `dense`, which means no sparsity."""
    return (
        value is None
        or value is False
        or value in ([], {})
        or (isinstance(value, dict) and value.get("format") == "dense")
    )
