"""Reads a Hugging Face `config.json` into a ModelSpec, family by family: a dictionary in, a spec out.

It opens no file, imports no vendor library and ignores `auto_map`: a checkpoint's code is never run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic import ValidationError

from edgekit.common.parsing import sentence_of
from edgekit.errors import InvalidInput, Unsupported
from edgekit.model.families import bert, qwen3_5
from edgekit.model.families.bert import read_bert
from edgekit.model.families.dense import read_llama, read_mistral, read_phi3, read_qwen2, read_qwen3, read_smollm3
from edgekit.model.families.experts import read_gpt_oss, read_lfm2_moe, read_mixtral, read_qwen3_moe
from edgekit.model.families.fields import Fields
from edgekit.model.families.gemma import read_gemma2, read_gemma3, read_gemma3n, read_gemma4
from edgekit.model.families.known_fields import refuse_unknown
from edgekit.model.families.lfm2 import read_lfm2
from edgekit.model.families.quant_scheme import quant_scheme
from edgekit.model.families.qwen3_5 import read_qwen3_5
from edgekit.model.families.variants import (
    read_arcee,
    read_cohere2,
    read_ernie4_5,
    read_exaone4,
    read_glm,
    read_glm4,
    read_granite,
    read_hunyuan,
    read_ministral3,
    read_olmo2,
    read_olmo3,
)
from edgekit.model.spec import ModelSpec

Reader = Callable[[Fields, str], ModelSpec]

FAMILIES: dict[str, Reader] = {
    "arcee": read_arcee,
    "bert": read_bert,
    "cohere2": read_cohere2,
    "ernie4_5": read_ernie4_5,
    "exaone4": read_exaone4,
    "gemma2": read_gemma2,
    "gemma3_text": read_gemma3,
    "gemma3n_text": read_gemma3n,
    "gemma4_text": read_gemma4,
    "glm": read_glm,
    "glm4": read_glm4,
    "gpt_oss": read_gpt_oss,
    "granite": read_granite,
    "hunyuan_v1_dense": read_hunyuan,
    "lfm2": read_lfm2,
    "lfm2_moe": read_lfm2_moe,
    "llama": read_llama,
    "ministral3": read_ministral3,
    "mistral": read_mistral,
    "mixtral": read_mixtral,
    "olmo2": read_olmo2,
    "olmo3": read_olmo3,
    "phi3": read_phi3,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
    "qwen3_5_text": read_qwen3_5,
    "qwen3_moe": read_qwen3_moe,
    "smollm3": read_smollm3,
}


class Wrapper(NamedTuple):
    """A multimodal model; only its text model, under `text_config`, is read."""

    text: str
    prefix: str
    head: str
    tied: bool = True  # the default, if the config does not say


WRAPPED: dict[str, Wrapper] = {
    "gemma3": Wrapper("gemma3_text", "language_model.model.", "language_model.lm_head"),
    "gemma3n": Wrapper("gemma3n_text", "model.language_model.", "lm_head"),
    "gemma4": Wrapper("gemma4_text", "model.language_model.", "lm_head"),
    "mistral3": Wrapper("ministral3", "language_model.model.", "language_model.lm_head"),
    "qwen3_5": Wrapper("qwen3_5_text", "model.language_model.", "lm_head", tied=False),
}


# Ignored tensors, which published checkpoints of a family contain in addition to the model.
_BESIDE = {"bert": bert.BESIDE, "qwen3_5_text": qwen3_5.BESIDE}


def is_extra(family: str, tensor: str) -> bool:
    """Return True for a tensor in checkpoints of the family that is not part of the model."""
    return family in _BESIDE and _BESIDE[family].fullmatch(tensor) is not None


def supported() -> str:
    """Return the names of all families, for messages."""
    return ", ".join(sorted([*FAMILIES, *WRAPPED]))


def is_known(config: dict[str, Any]) -> bool:
    """Return True if the config, valid or not, is of a supported family."""
    return config.get("model_type") in (*FAMILIES, *WRAPPED)


def model_from_config(config: dict[str, Any], name: str, where: str) -> ModelSpec:
    """Read `config` into a spec. `where` is the file named in errors."""
    fields = Fields(config, where)
    family = fields.text("model_type")
    if not is_known(config):
        raise fields.unsupported("model_type", f"is not supported; supported: {supported()}")
    try:
        spec = _wrapped(fields, WRAPPED[family], name) if family in WRAPPED else FAMILIES[family](fields, name)
    except ValidationError as error:
        raise InvalidInput(f"{where}: {sentence_of(error)}; correct the file") from error
    refuse_unknown(fields, family, WRAPPED[family].text if family in WRAPPED else None)
    try:
        quant_scheme(fields)
    except Unsupported as error:
        reason = f"its weights are quantised already: {str(error).removeprefix(f'{where}: ')}"
        return spec if spec.exportable else spec.model_copy(update={"exportable": reason})
    return spec


def _wrapped(fields: Fields, wrapped: Wrapper, name: str) -> ModelSpec:
    text = fields.section("text_config")
    if text is None:
        raise fields.missing("text_config")
    stated = text.text("model_type", wrapped.text)
    if stated != wrapped.text:
        raise text.unsupported("model_type", f"is not supported here; expected {wrapped.text}")
    # Tying and token ids come from the outer object.
    outer = {key: fields.get(key) for key in ("eos_token_id", "bos_token_id") if fields.get(key) is not None}
    tied = fields.flag("tie_word_embeddings", wrapped.tied)
    spec = FAMILIES[wrapped.text](text.changed(**outer, tie_word_embeddings=tied), name)
    return spec.model_copy(update={"prefix": wrapped.prefix, "head": wrapped.head})


def with_generation(spec: ModelSpec, generation: dict[str, Any], where: str) -> ModelSpec:
    """Return `spec` with the end-of-text ids of `generation_config.json`, which override the ids of `config.json`."""
    fields = Fields(generation, where)
    eos = fields.token_ids("eos_token_id", spec.vocab_size)
    bos = fields.token_ids("bos_token_id", spec.vocab_size)
    return spec.model_copy(update={"eos_ids": eos or spec.eos_ids, "bos_id": bos[0] if bos else spec.bos_id})
