"""What ONNX Runtime allocates: figures of the CPU, with their source in `facts`, and priors for CUDA."""

from __future__ import annotations

from functools import lru_cache

from edgekit.common.units import KIB, MIB, show_bytes
from edgekit.contracts.memory import LayerArrays, MemoryLoad, Term, sized, usual_terms
from edgekit.contracts.plan import MemoryFacts
from edgekit.contracts.recipe import Recipe, tensors_alike
from edgekit.contracts.recurrent import checkpoint_tokens, part_bytes
from edgekit.contracts.stored_weights import by_rows_bytes, layer_table, stored_weight_bytes, tensor_bytes
from edgekit.contracts.token_costs import CacheFormat
from edgekit.model.spec import ModelSpec
from edgekit_onnx.float16_kv import TOKENS_AT_ONCE
from edgekit_onnx.layout import SLICE_BYTES

DERIVING_BYTES = 4 * MIB  # the onnx package, which derives graphs: 3.9 MiB were measured
ADAPTED_LINEAR_BYTES = 58 << 10  # measured: 54 and 63 KB on models of 30 and 6 layers
# The arena of activations shrinks with a call for logits once earlier calls exceeded both limits. Memory kept for one
# size does not serve a larger one, and returning it takes little time compared with processing that many tokens.
KEPT_TOKENS, RETURNED_BYTES = 32, 1 * MIB
CACHE = CacheFormat(scale_bits=0)
# Its arena keeps free memory in pieces of the requested sizes.
ARRAYS = LayerArrays(hidden_copies=8.7, inner_copies=2.7, head_copies=2.65, own_input_copies=12.0, reuses=False)
_CUDA_ARRAYS = LayerArrays(bits=16)

_LIBRARY_BYTES = 9 * MIB + 256 * KIB  # of the runtime's 42 MiB, 32.7 were measured before the tokenizer is read
_GRAPH_BYTES = 118 * KIB  # of a plain layer
_DELTA_RULE_BYTES = 1 * MIB  # of the graph of a delta rule: 19 MiB were measured for 18 layers
_RUNNING_BYTES = 2 * MIB + 640 * KIB  # allocated once by the first step, in addition to the activations
_OPENING_SCALE_SHARE = 1.46  # of the largest tensor's scales, which opening copies with its values
_LOOKED_UP_BYTES = 1 * MIB  # the system maps the pages around a row too: 10 MiB for ten rows
_OWN_ROW_BYTES = 2 * MIB  # the system maps as much around a row of per-layer embeddings; 1.7 MB were measured
OWN_LAYOUT = "edgekit"  # of weights for edgekit's own operators, which map them: opening copies none
_PACKING_BYTES = 18 * MIB  # of pieces while edgekit's own order is made; 17 MiB were measured
_IN_FILE = {"scale_bits": 16, "bias_bits": 0, "minimum_bits": 16, "row_group": None}  # opening computes the others
_GRAPH_FILE_BYTES = 10 << 10  # of a layer
# What a layer's graph with outputs of attention adds to a plain one: 14 and 60 KiB were measured with a cache of 32 and
# 16 bits, around which each layer converts.
_ATTENDING_BYTES, _CONVERTING_BYTES = 14 << 10, 46 << 10
_FLOAT = 4


def facts(recipe: Recipe, cuda: bool, own: bool = False) -> MemoryFacts:
    """Return how the weights are stored, and what the runtime takes; `own`: with edgekit's operators."""
    # The scale of an s8 row is repeated for groups of the other matrices' size.
    group = min((rule.format.group for rule in recipe.rules if rule.format.group), default=128)
    if cuda:
        prior = "prior: weights are copied to the device, the CUDA context and libraries take some 600 MiB"
        return MemoryFacts(runtime_bytes=600 * MIB, scale_bits=16, row_group=group, float_bits=16, source=prior)
    return MemoryFacts(
        runtime_bytes=42 * MIB,
        scale_bits=32,
        bias_bits=32,  # packed weights store the sum of every block with its scale
        minimum_bits=32 * recipe.has_minima,
        row_group=group,
        float_bits=32,
        own_row_bytes=_OWN_ROW_BYTES,
        layout=OWN_LAYOUT if own else None,
        source="measured on x86-64 Linux over random models of 0.01 to 1.2 billion weights "
        "(examples/benchmarks/memory_contract.py); weights saved pre-packed are mapped",
    )


def memory_terms(load: MemoryLoad) -> list[Term]:
    """Return the terms of a decoder or an encoder."""
    if load.backend == "cuda":
        return usual_terms(load, arrays=_CUDA_ARRAYS, layer_bytes=_rule_bytes(load.model))
    in_file = load.facts.model_copy(update=_IN_FILE)
    weights = load.weights(mapped=1.0, copied=0.0, in_file=in_file)
    caches, runtime = load.caches(CACHE), load.runtime(_GRAPH_BYTES + _rule_bytes(load.model))
    library = sized("runtime_bytes", _LIBRARY_BYTES, "of library")
    later, deriving = [*weights, *runtime[2:], library, caches], DERIVING_BYTES if load.kv_bits < 32 else 0
    rows = looked_up_bytes(load, load.positions) if load.model.tied else 0
    has_table = load.head is None or load.head.own_embedding  # True: the model's embeddings are not looked up for it
    # A cosine and a sine for each rotated pair.
    tables = load.tables(_FLOAT * sum(rope.dim for rope in load.model.ropes.values()))
    again = 0 if has_table else looked_up_bytes(load, load.held_tokens)
    return [
        *weights,
        tables,
        *_files(load, tables, in_file),
        sized("mapped_weights_bytes", rows, "of rows that tokens look up"),
        sized("mapped_weights_bytes", again, "of rows that are mapped a second time for the head"),
        caches,
        *load.peak(_step(load), later, _opening(load, caches, runtime[2])),
        sized("activation_bytes", attending_bytes(load), "to score tokens"),
        *runtime,
        sized("runtime_bytes", deriving, "to derive graphs for this cache"),
        sized("draft_bytes", 0 if has_table else DERIVING_BYTES, "to derive the graph that looks embeddings up"),
        load.adapter(each=ADAPTED_LINEAR_BYTES, once=DERIVING_BYTES),
    ]


def _files(load: MemoryLoad, tables: Term, in_file: MemoryFacts) -> list[Term]:
    """Return the files of the artifact without weights, and weights that devices keep as packed for their processor."""
    stored = stored_weight_bytes(load.model, load.recipe, in_file)
    packed = round(stored * packed_share(load.facts.layout == OWN_LAYOUT))
    return [
        sized("disk_bytes", tables.bytes + _GRAPH_FILE_BYTES * len(load.model.layers), "of tables and graphs"),
        sized("disk_bytes", packed, "packed for the processor at the first opening"),
        Term("cached_disk_bytes", packed, "packed weights"),
    ]


def packed_share(own: bool) -> float:
    """Return what packed weights take of the weights in the file; `own`: for edgekit's operators."""
    # A tied table is in two graphs. edgekit's operators need no second copy of what they multiply: 1.25 to 1.75 were
    # measured.
    return 1.9 if own else 3.0


def _rule_bytes(model: ModelSpec) -> int:
    """Return the bytes of the graphs of delta rules, per layer."""
    return _DELTA_RULE_BYTES * sum(layer.delta_rule is not None for layer in model.layers) // len(model.layers)


def looked_up_bytes(load: MemoryLoad, tokens: int) -> int:
    """Return the mapped bytes of the embeddings of `tokens` tokens: at most the whole table."""
    table = next(tensor for tensor in load.model.tensors() if tensor.role == "embedding")
    return min(_LOOKED_UP_BYTES * tokens, load.recipe.format_of(table).bytes(table.shape))


def _opening(load: MemoryLoad, caches: Term, graph: Term) -> Term:
    """Return the copy of the largest tensor or slice, before the graph and the cache exist; they reuse its memory."""
    copied = max(0, _largest_copied_bytes(load.model, load.recipe, load.facts) - graph.bytes)
    why = f"{show_bytes(copied)} to open or pack the largest tensor, less the cache, which does not exist yet"
    return Term("opening_bytes", copied - caches.bytes - load.draft_bytes - load.prefix_bytes, why)


@lru_cache(maxsize=256)
def _largest_copied_bytes(model: ModelSpec, recipe: Recipe, facts: MemoryFacts) -> int:
    if facts.layout == OWN_LAYOUT:
        return _PACKING_BYTES
    most, values_only = 0.0, facts.model_copy(update={"scale_bits": 0, "bias_bits": 0})
    in_file = layer_table(model).module if by_rows_bytes(model, recipe, facts) else None
    for tensor, stored, _ in tensors_alike(model, recipe):
        if tensor.role != "norm" and tensor.module != in_file:
            whole, values = (tensor_bytes(tensor.shape, stored, each) for each in (facts, values_only))
            copied = values + (whole - values) * _OPENING_SCALE_SHARE
            most = max(most, min(copied, SLICE_BYTES) if tensor.role in ("embedding", "head") else copied)
    return round(most)


def fed_tokens(load: MemoryLoad) -> int:
    """Return the most tokens that a layer computes at once: with a 16-bit cache a piece of a chunk."""
    call = load.call_tokens(load.held_tokens)
    return min(call, TOKENS_AT_ONCE) if load.kv_bits == 16 else call


def _step(load: MemoryLoad) -> list[Term]:
    """Return the largest step: its widest layer and logits, masks, copies of the cache and of recurrent parts."""
    return [
        largest_layer(load, fed_tokens(load)),
        sized("activation_bytes", reading_bytes(load), f"to read the {load.kv_bits}-bit cache"),
        sized("activation_bytes", _RUNNING_BYTES, "for the first step"),
        sized("activation_bytes", load.next_rows * ARRAYS.row_bytes(load.model), "of logits before slices are joined"),
        load.masks(load.call_tokens(load.held_tokens), load.held_tokens),
        sized("activation_bytes", _recurrent_bytes(load), "of recurrent parts in a step"),
    ]


def largest_layer(load: MemoryLoad, tokens: int) -> Term:
    """Return the layer and the logits of the larger step: prefill of a chunk, or verification for all sequences."""
    most, rows = load.next_rows, load.logit_rows
    left = KEPT_TOKENS if load.drafts else 0  # their arrays stay allocated after a verification
    alone = rows if load.sequences > 1 else rows - most + 1  # a lone sequence does one of both at a time
    returned = ARRAYS.layers_bytes(load.model, tokens) >= RETURNED_BYTES
    reading = load.layer(ARRAYS, tokens + left, alone)
    verifying = load.layer(ARRAYS, (min(tokens, most) if returned else tokens) + left, rows)
    return max(reading, verifying, key=lambda term: term.bytes)


def reading_bytes(load: MemoryLoad) -> int:
    """Return the extra bytes of a step that attends to a 16-bit cache."""
    if load.kv_bits != 16:
        return 0
    model, piece = load.model, fed_tokens(load)
    widest = max(sum(model.qkv_widths(layer)[1:]) for layer in model.layers)
    # Scores in 16 and 32 bits (6 bytes), half as much for earlier pieces; keys and values in 32 bits; and the residual
    # in and out of a part.
    residual = 2 * (load.call_tokens(load.held_tokens) - piece) * model.hidden_size * ARRAYS.bits // 8
    return (9 * model.heads * piece + 4 * widest) * load.held_tokens + residual


def _recurrent_bytes(load: MemoryLoad) -> int:
    """Return the extra bytes of recurrent state that a step allocates: a copy for every sequence.

    A prompt is read for one sequence. A step of all sequences leaves the rest of a prompt's activations to them.
    """
    if checkpoint_tokens(load.model) is None:
        return 0
    spare = largest_layer(load, fed_tokens(load)).bytes - largest_layer(load, load.sequences).bytes
    one = part_bytes(load.model)
    return max(one, load.sequences * one - spare)


def attending_bytes(load: MemoryLoad) -> int:
    """Return the bytes of graphs with outputs of attention, and of scoring tokens by it; 0 for other windows."""
    policy, model, kv_bits = load.policy, load.model, load.kv_bits
    if policy is None or policy.window is None or not policy.is_scored:
        return 0
    from edgekit.enginekit.keeping import ByAttention, scorers  # loads numpy, which only windows by scores need

    scorer = scorers().get(policy.keep)
    if not isinstance(scorer, ByAttention):
        return 0
    newest, caching = min(scorer.newest, policy.block), [layer for layer in model.layers if layer.stores_kv]
    # Of one layer at a time: the weights, their copy that leaves the operator, and that as float.
    weights = model.heads * newest * policy.window * (2 * kv_bits // 8 + _FLOAT)
    sums = 2 * _FLOAT * model.heads * len(caching) * policy.window
    computed = newest * sum(2 * layer.kv_heads * layer.head_dim for layer in caching) * kv_bits // 8
    graph = _GRAPH_BYTES + _rule_bytes(model) + _ATTENDING_BYTES + (_CONVERTING_BYTES if kv_bits < 32 else 0)
    graphs = graph * len(model.layers) + (DERIVING_BYTES if kv_bits >= 32 else 0)
    # Measured on SmolLM2, a window of 512: 8.3 and 14.1 MiB for SnapKV with 16 and 32 bits.
    return weights + sums + computed + graphs + ARRAYS.layers_bytes(model, newest)
