"""One rank of a server: the part of the model that one GPU holds, described as a model, and its memory.

The memory of a rank is predicted by the terms of any model. Always the fullest rank is
described.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from edgekit import ModelSpec, Recipe
from edgekit.apps.handover.server_plan import KVFormat, ParallelLayout, RankMemory
from edgekit.contracts.memory import LayerArrays, MemoryLoad, total, usual_terms
from edgekit.contracts.plan import MemoryFacts, Violation
from edgekit.contracts.recipe import GROUPS
from edgekit.contracts.stored_weights import adapter_bytes
from edgekit.contracts.token_costs import CacheFormat

CHUNK_TOKENS = 8192  # prompt tokens of one step; the generated files set the same
_VOCABULARY_STEP = 64  # rows to which servers pad the vocabulary before they divide it
_LOGIT_COPIES = 10
_GRAPH_BYTES_A_LAYER = 16 << 20
_ROWS = ("o_proj", "down_proj", "w2")  # divided along their inputs; the others along their outputs
_SOURCE = (
    "vLLM's own profile of Llama-3-8B on a GPU of 80 GB: 1.79 GiB outside torch alone and 3.58 GiB with two ranks,"
    " 1.26 GiB of activations at 256 sequences, which is ten copies of the logits (vllm-project/vllm#10511); CUDA"
    " graphs: 0.36 GiB for 16 sizes (gpustack/runner#251), here 16 MiB a layer"
)


def gpu_facts(layout: ParallelLayout) -> MemoryFacts:
    """Return the facts about a rank."""
    runtime = round((1.8 if layout.tensor * layout.pipeline == 1 else 3.6) * 2**30)
    return MemoryFacts(
        runtime_bytes=runtime, tokenizer_bytes=0, tokenizer_reading_bytes=0, float_bits=16, source=_SOURCE
    )


@lru_cache(maxsize=1024)
def rank_model(model: ModelSpec, layout: ParallelLayout) -> ModelSpec:
    """Return the part of `model` on the fullest rank. The layout must divide the model (`misfits`)."""
    tensor, experts = layout.tensor, model.experts
    if experts is not None:
        share = {"count": -(-experts.count // layout.expert_group)}
        part = {"intermediate_size": max(1, experts.intermediate_size // tensor)}
        experts = experts.model_copy(update=share if layout.experts else part)
    layers = tuple(
        layer.model_copy(
            update={
                "kv_heads": max(1, layer.kv_heads // tensor),
                "intermediate_size": layer.intermediate_size and layer.intermediate_size // tensor,
            }
        )
        for layer in model.layers[: -(-len(model.layers) // layout.pipeline)]
    )
    padded = -(-model.vocab_size // _VOCABULARY_STEP) * _VOCABULARY_STEP
    return model.model_copy(
        update={
            "heads": model.heads // tensor,
            "intermediate_size": model.intermediate_size // tensor,
            "vocab_size": -(-padded // tensor),
            "layers": layers,
            "experts": experts,
            "tied": model.tied or layout.pipeline > 1,  # a stage has the embedding or the head, not both
        }
    )


def misfits(model: ModelSpec, recipe: Recipe, layout: ParallelLayout, *, uneven_experts: bool) -> Iterator[Violation]:
    """Yield the sizes that the layout cannot divide: heads, KV heads, widths, quantisation groups, layers, experts."""
    tensor = layout.tensor
    if model.heads % tensor:
        yield Violation("heads", f"{model.heads} heads over {tensor} GPUs", "a divisor of the heads")
    for heads in sorted({layer.kv_heads for layer in model.layers}):
        if heads % tensor and tensor % heads:
            yield Violation("KV heads", f"{heads} KV heads over {tensor} GPUs", "a divisor or a multiple of them")
    if layout.pipeline > len(model.layers):
        yield Violation("layers", f"{len(model.layers)} layers over {layout.pipeline} stages", "a layer for each stage")
    if layout.experts and model.experts is not None:
        count, group = model.experts.count, layout.expert_group
        if group > count or (count % group and not uneven_experts):
            yield Violation("experts", f"{count} experts over {group} GPUs", "a divisor of the experts")
    yield from _widths(model, recipe, layout)


def _widths(model: ModelSpec, recipe: Recipe, layout: ParallelLayout) -> Iterator[Violation]:
    tensor = layout.tensor
    for matrix in _divided(model, recipe):
        if matrix.is_expert and layout.experts:
            continue
        if matrix.size % tensor:
            yield Violation("width", f"{matrix.kind}: {matrix.size:,} values over {tensor} GPUs", "a divisor of them")
        elif matrix.group and matrix.size // tensor % matrix.group:
            rest = f"{matrix.size:,} / {tensor} = {matrix.size // tensor:,} values a row"
            yield Violation("group", f"{matrix.kind}: {rest}", f"a multiple of the group of {matrix.group}")


class DividedMatrix(NamedTuple):
    """A kind of matrix that tensor parallelism divides, and the size that is divided."""

    kind: str
    size: int
    is_row: bool  # divided along its inputs, across the groups of its quantisation
    group: int | None  # of a row
    is_expert: bool


@lru_cache(maxsize=64)
def _divided(model: ModelSpec, recipe: Recipe) -> tuple[DividedMatrix, ...]:
    """Return every kind of divided matrix but queries, keys and values, which are divided by heads."""
    kinds: dict[DividedMatrix, None] = {}
    for each in model.tensors():
        is_attention = each.module.endswith(("q_proj", "k_proj", "v_proj", "qkv_proj"))
        if each.role in ("linear", "expert") and len(each.shape) >= 2 and not is_attention:
            is_row = each.module.endswith(_ROWS)
            kind = ".".join(word for word in each.module.split(".")[-3:] if not word.isdigit())
            size, group = (each.shape[-1], recipe.format_of(each).group) if is_row else (each.shape[-2], None)
            kinds[DividedMatrix(kind, size, is_row, group, each.role == "expert")] = None
    return tuple(kinds)


def group_that_divides(model: ModelSpec, recipe: Recipe, layout: ParallelLayout) -> int | None:
    """Return the largest s4 group that divides the rows of every rank; None if no group does."""
    rows = {
        matrix.size // layout.tensor
        for matrix in _divided(model, recipe)
        if matrix.is_row and not (matrix.is_expert and layout.experts)
    }
    return next((group for group in GROUPS if all(row % group == 0 for row in rows)), None)


def kv_bits(form: KVFormat) -> int:
    """Return the bits of a key or value in the cache."""
    return 8 if form == "fp8" else 16


class ServedHead(NamedTuple):
    """A drafting head of one layer on a server: its weights in 16 bits, and the sizes of its cache."""

    weight_bytes: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: ModelSpec, tensors: Iterable[tuple[str, tuple[int, ...]]], *, has_embedding: bool) -> ServedHead:
        """Describe a head by its layer, as a model, and the names and shapes of its tensors."""
        values = sum(prod(shape) for _, shape in tensors)
        values += model.vocab_size * model.hidden_size if has_embedding else 0
        return cls(2 * values, model.layers[0].kv_heads, model.layers[0].head_dim)

    def bytes(self, ranks: int, tokens: int, kv_bits: int) -> int:
        """Return its bytes on one of `ranks` GPUs that share it, with `tokens` cached."""
        heads = -(-self.kv_heads // ranks)
        return -(-self.weight_bytes // ranks) + 2 * heads * self.head_dim * tokens * kv_bits // 8


class ServerSubject(NamedTuple):
    """The model to serve, its recipe, and the models that run with it."""

    model: ModelSpec
    source: str
    config_sha256: str
    recipe: Recipe
    draft: ModelSpec | None = None
    drafter: ServedHead | None = None
    adapter_rank: int = 0
    notes: tuple[str, ...] = ()


class Load(NamedTuple):
    """The context and the concurrency that a layout is priced for; a search for fixes changes one of them."""

    context: int
    sequences: int
    kv_format: KVFormat


def rank_memory(subject: ServerSubject, layout: ParallelLayout, load: Load, *, adapters: int = 0) -> RankMemory:
    """Predict the memory of the fullest rank, which carries `load`."""
    model, recipe = subject.model, subject.recipe
    context, sequences, width = load.context, load.sequences, kv_bits(load.kv_format)
    rank = rank_model(model, layout)
    graphs = _GRAPH_BYTES_A_LAYER * len(rank.layers)
    # Every rank gathers the logits of the whole vocabulary.
    terms = usual_terms(
        MemoryLoad(rank, recipe, "cuda", gpu_facts(layout), context, sequences, width, CHUNK_TOKENS),
        arrays=LayerArrays(bits=16),
        cache=CacheFormat(scale_bits=0, step_tokens=16, bounds_windows=True),
        layer_bytes=_GRAPH_BYTES_A_LAYER,
        planned_rows=(_LOGIT_COPIES * layout.tensor - 1) * sequences,
    )
    draft_bytes = 0
    if subject.draft is not None:
        draft_memory = rank_memory(ServerSubject(subject.draft, "", "", recipe), layout, load)
        draft_bytes = draft_memory.weights_bytes + draft_memory.kv_bytes + draft_memory.graph_bytes
    if subject.drafter is not None:
        draft_bytes += subject.drafter.bytes(layout.tensor, context * sequences, width)
    return RankMemory(
        weights_bytes=total(terms, "private_weights_bytes") + _router_bytes(model, recipe, layout),
        kv_bytes=total(terms, "kv_bytes"),
        activation_bytes=total(terms, "activation_bytes"),
        graph_bytes=graphs,
        runtime_bytes=total(terms, "runtime_bytes") - graphs,
        draft_bytes=draft_bytes,
        adapter_bytes=adapters * adapter_bytes(rank, subject.adapter_rank, 16),
    )


@lru_cache(maxsize=1024)
def _router_bytes(model: ModelSpec, recipe: Recipe, layout: ParallelLayout) -> int:
    """Return the bytes of the router rows that `rank_model` leaves out: every rank has a row for every expert."""
    if not layout.experts or model.experts is None:
        return 0
    routers = [tensor for tensor in model.tensors() if tensor.role == "router"]
    held = -(-model.experts.count // layout.expert_group) / model.experts.count
    return round(sum(recipe.format_of(each).bytes(each.shape) for each in routers) / layout.pipeline * (1 - held))
