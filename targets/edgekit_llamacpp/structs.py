"""The C structs that llama.cpp passes by value, as the pinned build lays them out.

They differ between builds, and the library does not check them: a wrong layout corrupts memory. `library` therefore
compares the default values with `MODEL_DEFAULTS` and `CONTEXT_DEFAULTS` before anything is called.
"""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from typing import Any, ClassVar

LogCallback = CFUNCTYPE(None, c_int32, c_char_p, c_void_p)

MODEL_BYTES, CONTEXT_BYTES, OVERRIDE_BYTES = 80, 168, 264


class ModelParams(Structure):
    """`llama_model_params`."""

    _fields_: ClassVar[Any] = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


class ContextParams(Structure):
    """`llama_context_params`."""

    _fields_: ClassVar[Any] = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    ]


class TokenBatch(Structure):
    """`llama_batch`: tokens with their positions and sequences, and flags for those whose logits are requested."""

    _fields_: ClassVar[Any] = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


class _OverrideValue(Union):
    _fields_: ClassVar[Any] = [
        ("val_i64", c_int64),
        ("val_f64", c_double),
        ("val_bool", c_bool),
        ("val_str", c_char * 128),
    ]


class Override(Structure):
    """`llama_model_kv_override`: a value that replaces one in the file's metadata. An empty key ends the list."""

    _fields_: ClassVar[Any] = [("tag", c_int32), ("key", c_char * 128), ("value", _OverrideValue)]


# An empty list of devices other than the CPU: a library built for a GPU would reserve memory there without layers.
NO_DEVICES = c_void_p()
NUMBER_OVERRIDE, TEXT_OVERRIDE = 0, 3  # LLAMA_KV_OVERRIDE_TYPE_INT, LLAMA_KV_OVERRIDE_TYPE_STR

MODEL_DEFAULTS: dict[str, float | None] = {
    "devices": None, "tensor_buft_overrides": None, "n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0,
    "tensor_split": None, "progress_callback": None, "kv_overrides": None, "vocab_only": False,
    "check_tensors": False, "use_extra_bufts": True, "no_host": False, "no_alloc": False,
}  # fmt: skip
CONTEXT_DEFAULTS: dict[str, float | None] = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0, "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1, "rope_scaling_type": -1, "pooling_type": -1, "attention_type": -1,
    "flash_attn_type": -1, "rope_freq_base": 0.0, "rope_freq_scale": 0.0, "yarn_ext_factor": -1.0, "type_k": 1,
    "type_v": 1, "abort_callback": None, "embeddings": False, "offload_kqv": True, "no_perf": True, "op_offload": True,
    "swa_full": True, "kv_unified": False, "samplers": None, "n_samplers": 0, "ctx_other": None,
}  # fmt: skip
