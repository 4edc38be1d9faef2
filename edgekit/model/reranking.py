"""Reads from a model folder how the model scores documents, if it does.

An encoder with a classifier says so in `config.json`. That of Qwen3-Reranker is the one of any Qwen3, so it is known by
the model's name, by the prompt in its chat template, or by the fields that vLLM reads for it.
"""

from __future__ import annotations

from pathlib import Path

from edgekit.common.parsing import MAX_TEXT_BYTES, parse_json, read_bytes
from edgekit.errors import Unsupported
from edgekit.model.families.bert import read_score_activation
from edgekit.model.families.fields import Fields
from edgekit.model.parts import Reranking
from edgekit.model.spec import ModelSpec
from edgekit.model.text_embedding import LOGIT_SCORE, LOGIT_SCORE_CONFIG, MODULES, PROMPTS

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_FAMILY, _NAME = "qwen3", "qwen3-reranker"
_STATED, _TOKENS = "is_original_qwen3_reranker", "classifier_from_token"
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


def read_reranking(folder: Path, spec: ModelSpec, fields: Fields) -> Reranking | None:
    """Return how the model in `folder` scores documents, from its files and its config's `fields`; None: it does not.

    Raises `Unsupported` for rerankers that edgekit does not compute.
    """
    if spec.reranking is not None:
        return _as_stated(folder / PROMPTS, spec.reranking)
    tokens, is_stated = fields.get(_TOKENS), fields.flag(_STATED, False)
    if tokens not in (None, ["no", "yes"]):
        raise fields.unsupported(_TOKENS, 'is not supported; supported: ["no", "yes"]')
    is_known = spec.family == _FAMILY and (is_stated or _NAME in spec.name.lower() or _has_its_prompt(folder))
    if is_stated and not is_known:
        raise fields.unsupported(_STATED, f"is not supported in {spec.family}; it belongs to {_FAMILY}")
    modules = folder / MODULES
    if modules.is_file() and LOGIT_SCORE.encode() in read_bytes(modules, MAX_TEXT_BYTES):
        if not is_known:
            raise Unsupported(f"{modules}: step {LOGIT_SCORE} is only supported with Qwen3-Reranker's prompt")
        return _of_tokens(folder / LOGIT_SCORE_CONFIG, spec.vocab_size)
    return Reranking(kind="qwen3") if is_known else None


def _as_stated(path: Path, found: Reranking) -> Reranking:
    """Return a classifier's settings with the activation that newer releases of sentence-transformers state here."""
    if not path.is_file():
        return found
    activation = read_score_activation(
        Fields(parse_json(read_bytes(path, MAX_TEXT_BYTES), str(path)), str(path)), "activation_fn"
    )
    return found if activation is None else found.model_copy(update={"activation": activation})


def _has_its_prompt(folder: Path) -> bool:
    """Return True if a template holds the first sentence of the prompt."""
    sentence = SYSTEM.partition(".")[0].encode()
    paths = (folder / name for name in _TEMPLATES)
    return any(path.is_file() and sentence in read_bytes(path, MAX_TEXT_BYTES) for path in paths)


def _of_tokens(path: Path, vocabulary: int) -> Reranking:
    fields = Fields(parse_json(read_bytes(path, MAX_TEXT_BYTES), str(path)), str(path))
    found = [fields.maybe_count(f"{name}_token_id", vocabulary - 1, least=0) for name in ("true", "false")]
    if None in found:
        name = "true_token_id" if found[0] is None else "false_token_id"
        raise fields.unsupported(name, "is not supported; give the tokens of both answers")
    return Reranking(kind="qwen3", yes=found[0], no=found[1])
