"""The memory of a plan: every class, on the CPU and divided with a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import shapes
from configs import PUBLISHED
from edgekit_llamacpp.memory import memory_terms
from edgekit_onnx import memory as onnx
from hypothesis import given, settings, strategies as st

from edgekit.common.units import KIB, MIB, show_bytes
from edgekit.contracts.device import DeviceProfile, SourcedBytes
from edgekit.contracts.memory import LayerArrays, MemoryLoad, Term, total, usual_terms
from edgekit.contracts.plan import MemoryFacts, Plan
from edgekit.contracts.recipe import RECIPES, Format, Recipe, Rule, bits_per_weight, tensors_alike, weight_bytes
from edgekit.contracts.stored_weights import sharing_notes, stored_weight_bytes
from edgekit.contracts.token_costs import (
    CacheFormat,
    active_parameters,
    kv_bytes,
    operations_per_token,
    touched_weight_bytes,
)
from edgekit.device.load import load_profile
from edgekit.errors import DoesNotFit
from edgekit.model.spec import ModelSpec
from edgekit.planner.gpu_layers import describe, most_layers
from edgekit.planner.make import make_plans
from edgekit.planner.memory import explain, predict, with_facts
from edgekit.planner.request import PlanRequest
from edgekit.planner.speed import touched_notes
from edgekit.runtime.memory.admission import RunConfig, estimate_of

PLAIN = MemoryFacts(runtime_bytes=0, float_bits=16, source="a test")


@pytest.mark.parametrize("pattern", ["*.down_proj", "*layers.1.*", "*.[0-3].*proj", "*s.?.mlp*"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_that_are_alike_are_counted_together(name: str, pattern: str) -> None:
    model, s8 = shapes.spec_of(PUBLISHED[name]), Rule(pattern=pattern, format=Format(kind="s8"))
    recipe = RECIPES["s4-g32"].model_copy(update={"rules": (s8, *RECIPES["s4-g32"].rules)})
    found = Counter[object]()
    for tensor, stored, number in tensors_alike(model, recipe):
        found[tensor.role, tensor.shape, stored] += number
    assert found == Counter((each.role, each.shape, recipe.format_of(each)) for each in model.tensors())


def test_seventy_billion_at_4096_tokens_and_32_sequences_hold_40_gib_of_keys_and_values() -> None:
    assert kv_bytes(shapes.spec_of(shapes.LLAMA_2_70B), 4096, 16) * 32 == 40 << 30


@pytest.mark.parametrize(("kind", "gigabytes"), [("float32", 280), ("float16", 140), ("s8", 70)])
def test_weights_of_70b_take_the_published_bytes(kind: str, gigabytes: int) -> None:
    stored = weight_bytes(shapes.spec_of(shapes.LLAMA_2_70B), RECIPES[kind])
    assert stored == pytest.approx(gigabytes * 1e9, rel=0.02)


def test_seventy_billion_weights_in_four_bits_take_35_gb_and_their_scales() -> None:
    recipe = Recipe(name="all-s4", rules=(Rule(pattern="*", format=Format(kind="s4", group=128)),))
    stored = weight_bytes(shapes.spec_of(shapes.LLAMA_2_70B), recipe)
    assert stored == pytest.approx(35e9 * (1 + 16 / 128 / 4), rel=0.02)


def test_alternating_windows_are_counted_by_layer() -> None:
    model = shapes.spec_of(shapes.GEMMA_3_1B)
    windowed = [layer for layer in model.layers if layer.window is not None]
    assert (len(model.layers), len(windowed)) == (26, 22)
    a_token = 2 * 1 * 256 * 2
    assert kv_bytes(model, 8192, 16) == a_token * (22 * 512 + 4 * 8192)
    assert CacheFormat().kv_bytes(model, 8192, 16) == a_token * 26 * 8192
    assert kv_bytes(model, 300, 16) == a_token * 26 * 300


def test_shared_layers_hold_no_keys_and_values_of_their_own() -> None:
    model = shapes.spec_of(shapes.LLAMA_32_1B)
    sharing = model.model_copy(
        update={
            "layers": tuple(
                layer.model_copy(update={"stores_kv": index < 12}) for index, layer in enumerate(model.layers)
            )
        }
    )
    assert kv_bytes(sharing, 100, 16) * 16 == kv_bytes(model, 100, 16) * 12


ORIN_SPEEDS = {"LLAMA_31_8B": 19.14, "LLAMA_32_3B": 43.07, "QWEN_25_7B": 21.75, "GEMMA_2_2B": 34.97}


def test_one_bandwidth_explains_three_of_four_published_speeds_of_the_orin_nano() -> None:
    bandwidth = load_profile("jetson-orin-nano-8gb").usable_bandwidth_gb_s.value * 1e9
    ratio = {
        name: bandwidth
        / touched_weight_bytes(shapes.spec_of(getattr(shapes, name)), RECIPES["s4-g32"], PLAIN)
        / published
        for name, published in ORIN_SPEEDS.items()
    }
    near = {name for name, value in ratio.items() if abs(value - 1) <= 0.2}
    assert near == {"LLAMA_31_8B", "LLAMA_32_3B", "QWEN_25_7B"}
    # Gemma 2 is predicted some 40 % too fast: 26 narrow layers with four norms each, softcapped attention, and a
    # vocabulary of 256,000 to choose from on every token, so it waits for launches and not for memory.
    assert 1.3 < ratio["GEMMA_2_2B"] < 1.6


# Billions of active parameters on the models' cards, the first without the looked-up embedding.
ACTIVE = {"gpt-oss-20b": (3.61, False), "Qwen3-30B-A3B": (3.3, True), "Mixtral-8x7B": (12.9, True)}


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_of_a_mixture_reads_the_active_parameters(name: str) -> None:
    model, (published, with_embedding) = shapes.spec_of(PUBLISHED[name]), ACTIVE[name]
    active = active_parameters(model) + with_embedding * model.vocab_size * model.hidden_size
    assert active / 1e9 == pytest.approx(published, abs=0.06)  # cards may cut digits off
    recipe, float16 = RECIPES["s4-g64"], RECIPES["float16"]
    assert touched_weight_bytes(model, float16, PLAIN) == pytest.approx(2 * active_parameters(model), rel=0.001)
    (note,) = touched_notes(model, recipe, PLAIN)
    assert note.startswith(f"one token reads {show_bytes(touched_weight_bytes(model, recipe, PLAIN))} of ")


@pytest.mark.parametrize("shape", ["GEMMA_3_1B", "LLAMA_32_1B", "LLAMA_31_8B"])
def test_a_prompt_token_is_multiplied_with_everything_but_the_head(shape: str) -> None:
    model = shapes.spec_of(getattr(shapes, shape))
    in_layers = sum(tensor.size for tensor in model.tensors() if tensor.role not in ("embedding", "head"))
    assert operations_per_token(model) == pytest.approx(2 * in_layers, rel=1e-5)  # and a row of the embedding
    assert operations_per_token(model) < 0.95 * 2 * active_parameters(model)


def test_bits_per_weight_count_embedding_and_head() -> None:
    model = shapes.spec_of(shapes.LLAMA_32_1B)
    assert bits_per_weight(model, RECIPES["s4-g128"]) == pytest.approx(4.125 + 0.2126 * 3.88, abs=0.01)
    assert bits_per_weight(model, RECIPES["float16"]) == 16


def test_a_budget_of_bits_is_spent_in_full_unless_the_rules_cost_more() -> None:
    big, small = shapes.spec_of(shapes.LLAMA_2_70B), shapes.spec_of(shapes.LLAMA_32_1B)
    mixed, plain = RECIPES["mixed-4.5"], RECIPES["s4-g128"]
    assert stored_weight_bytes(big, mixed, PLAIN) == int(big.parameters * 4.5 / 8)
    assert stored_weight_bytes(small, mixed, PLAIN) == stored_weight_bytes(small, plain, PLAIN)


def load_for(model: ModelSpec, recipe: str = "s8", tokens: int = 16, bits: int = 16, chunk: int = 16) -> MemoryLoad:
    return MemoryLoad(model, RECIPES[recipe], "cpu", PLAIN, tokens, 1, bits, chunk)


def test_an_estimate_is_the_sum_of_its_classes() -> None:
    load = load_for(shapes.spec_of(shapes.LLAMA_32_1B), "s4-g64", 4096, chunk=512)
    load = load._replace(sequences=2, draft_bytes=7, prefix_bytes=5)
    estimate = predict(load, lambda load: usual_terms(load, load.weights(mapped=0.25, copied=0.75)))
    classes = estimate.model_dump(exclude={"gpu_bytes", "disk_bytes"})  # on top of the classes
    assert estimate.total_bytes == sum(classes.values())
    assert estimate.private_bytes == estimate.total_bytes - estimate.mapped_weights_bytes
    assert estimate.mapped_weights_bytes == pytest.approx(estimate.private_weights_bytes / 3, rel=1e-6)
    assert predict(load, lambda load: ()).total_bytes == 7 + 5  # a target of others may leave classes out


def test_a_measured_tokenizer_replaces_the_figure_by_vocabulary() -> None:
    model = shapes.spec_of(shapes.LLAMA_32_1B)

    def mapped(load: MemoryLoad) -> list[Term]:
        return usual_terms(load, load.weights(mapped=1, copied=0))

    load = load_for(model)
    read = PLAIN.model_copy(update={"tokenizer_bytes": 70_000_000, "tokenizer_reading_bytes": 900_000_000})
    measured = load._replace(facts=read)
    assert predict(load, mapped).runtime_bytes == 384 * model.vocab_size
    estimate = predict(measured, mapped)
    assert estimate.runtime_bytes == 70_000_000
    # Reading the file is over before the cache exists; copied weights take that memory again.
    assert estimate.activation_bytes + estimate.opening_bytes + estimate.kv_bytes == 900_000_000
    assert not predict(measured, usual_terms).opening_bytes
    assert not predict(measured._replace(is_open=True), mapped).opening_bytes


def test_what_onnx_does_not_hold_yet_is_not_counted_while_the_tokenizer_is_read() -> None:
    load = load_for(shapes.spec_of(shapes.LLAMA_32_1B), bits=32)
    read = PLAIN.model_copy(update={"runtime_bytes": 42 * MIB, "tokenizer_reading_bytes": 900_000_000})
    estimate = predict(load._replace(facts=read), onnx.memory_terms)
    library, graph = 9 * MIB + 256 * KIB, 16 * 118 * KIB
    assert estimate.activation_bytes + estimate.opening_bytes + estimate.kv_bytes == 900_000_000 - library - graph


def test_narrow_caches_and_adapters_take_what_derives_their_graphs() -> None:
    load = load_for(shapes.spec_of(shapes.LLAMA_32_1B), bits=32)
    estimates = {bits: predict(load._replace(kv_bits=bits), onnx.memory_terms) for bits in (32, 16, 8)}
    for bits in (16, 8):
        assert estimates[bits].runtime_bytes - estimates[32].runtime_bytes == onnx.DERIVING_BYTES
    ranks = [predict(load._replace(adapter_rank=rank), onnx.memory_terms).adapter_bytes for rank in (4, 8)]
    linears = 16 * 7 * onnx.ADAPTED_LINEAR_BYTES
    assert ranks[1] - onnx.DERIVING_BYTES - linears == 2 * (ranks[0] - onnx.DERIVING_BYTES - linears)


def test_every_class_prints_its_arithmetic() -> None:
    plan = make_plans("demo", ["laptop-x86-16gb"], PlanRequest(sequences=2, context=1024))[0]
    lines = explain(plan, onnx.memory_terms)
    assert len(lines) == 10
    cache = next(line for line in lines if line.startswith("cache"))
    assert cache.endswith("= 2 × (6 layers × 2 × 2 heads × 64 × 1,024 tokens) × 32 bit")
    assert plan.estimate.kv_bytes == 2 * 6 * 2 * 2 * 64 * 1024 * 4


def test_verified_rows_count_with_a_prompt_unless_a_lone_sequence_alternates() -> None:
    model = shapes.spec_of(shapes.LLAMA_32_1B)
    load, row = load_for(model, tokens=4096, bits=32, chunk=512), model.vocab_size * 4

    def step(load: MemoryLoad) -> int:
        return total(usual_terms(load._replace(is_open=True)), "activation_bytes")

    layers = LayerArrays().layers_bytes(model, 512)
    drafting = load._replace(drafts=True)
    for sequences, rows in ((1, 20), (4, 20), (8, 30)):
        assert step(load._replace(sequences=sequences)) == layers + (sequences + 1) * row
        assert step(drafting._replace(sequences=sequences)) == layers + (rows + 1) * row
    # onnx gives a prompt's layers back once it was read, so they and the rows of a lone draft are never there together.
    layers, few = (onnx.ARRAYS.layers_bytes(model, tokens + onnx.KEPT_TOKENS) for tokens in (512, 16))
    assert onnx.largest_layer(drafting, 512).bytes == max(layers + 6 * row, few + 21 * row)
    assert onnx.largest_layer(drafting._replace(sequences=2), 512).bytes == layers + 21 * row


def _models() -> st.SearchStrategy[ModelSpec]:
    names = ["LLAMA_32_1B", "GEMMA_3_1B", "LLAMA_2_70B", "QWEN_25_7B"]
    return st.sampled_from([shapes.spec_of(getattr(shapes, name)) for name in names])


@settings(deadline=None, max_examples=60)
@given(_models(), st.integers(1, 200_000), st.integers(1, 50_000), st.sampled_from([4, 8, 16, 32]), st.booleans())
def test_a_longer_context_or_more_cache_bits_never_cost_fewer_bytes(
    model: ModelSpec, tokens: int, more: int, bits: int, bounded: bool
) -> None:
    cache = CacheFormat(bounds_windows=bounded)
    assert cache.kv_bytes(model, tokens + more, bits) >= cache.kv_bytes(model, tokens, bits)
    assert cache.kv_bytes(model, tokens, bits) >= cache.kv_bytes(model, tokens, bits // 2)
    load = load_for(model, tokens=tokens, bits=bits, chunk=512)
    assert onnx.largest_layer(load, tokens + more).bytes >= onnx.largest_layer(load, tokens).bytes


@settings(deadline=None, max_examples=40)
@given(_models(), st.integers(1, 100_000))
def test_a_step_for_each_token_of_a_head_is_counted_by_heads(model: ModelSpec, tokens: int) -> None:
    heads = [layer.kv_heads for layer in model.layers]
    values = [layer.kv_heads * layer.head_dim for layer in model.layers]
    cache = CacheFormat(scale_bits=40, groups=())
    assert cache.state_bytes(model, tokens, 8) == tokens * 2 * (sum(values) + 5 * sum(heads))
    assert cache.state_bytes(model, tokens, 32) == tokens * 2 * 4 * sum(values)


def test_scores_and_copies_of_a_16_bit_cache_are_counted() -> None:
    model = shapes.spec_of(shapes.LLAMA_32_1B)
    load = load_for(model, tokens=2048, chunk=512)
    narrow = load._replace(kv_bits=8)
    assert [onnx.fed_tokens(each) for each in (load, narrow)] == [64, 512]
    residual = 2 * (512 - 64) * model.hidden_size * 4
    in_32_bits = 2048 * 2 * 8 * 64 * 4  # keys and values of one layer: 8 heads of 64 values
    assert onnx.reading_bytes(load) == 9 * model.heads * 64 * 2048 + in_32_bits + residual
    assert onnx.reading_bytes(narrow) == 0


def test_calls_of_a_hybrid_are_counted_as_they_are_cut() -> None:
    """LFM2 has a checkpoint every 128 tokens, so a chunk of 512 takes no more than one of 128."""
    load = load_for(shapes.spec_of(PUBLISHED["LFM2-350M"]), "s4-g32", 4096, 32, 512)
    plain = load._replace(model=shapes.spec_of(shapes.LLAMA_32_1B))
    assert load.call_tokens(4096) == 128 and plain.call_tokens(4096) == 512
    sizes = {
        tokens: predict(load._replace(chunk_tokens=tokens), usual_terms).activation_bytes for tokens in (512, 128, 64)
    }
    assert sizes[512] == sizes[128] > sizes[64]


def test_per_layer_embeddings_are_read_by_rows_and_shared_caches_counted_once() -> None:
    """Gemma 4 E2B in 4 bits: the table stays in the file, and 20 of 35 layers have no cache of their own."""
    model, recipe = shapes.spec_of(PUBLISHED["Gemma-4-small"]), RECIPES["s4-g32"]
    by_rows = PLAIN.model_copy(update={"own_row_bytes": 1000})
    load = load_for(model, "s4-g32", 4096, chunk=64)
    whole, found = (predict(load._replace(facts=each), usual_terms) for each in (PLAIN, by_rows))
    table = 262_144 * (35 * 256 + 2)  # 8 bits, and a scale for each row
    assert whole.private_weights_bytes - found.private_weights_bytes == table
    assert (whole.mapped_weights_bytes, found.mapped_weights_bytes) == (0, 4096 * (35 * 256 + 2 + 1000))
    assert whole.disk_bytes == found.disk_bytes
    own = 12 * 256 + 3 * 512
    assert found.kv_bytes == 2 * 2 * own * 4096
    assert [note.partition(":")[0] for note in sharing_notes(model, recipe, by_rows)] == [
        "per-layer embeddings, 2.19 GiB, are read by rows from the mapped file",
        "20 of 35 layers read the caches of layers 13 and 14, which are counted once",
    ]


def plan_on(device: str | DeviceProfile, **request: Any) -> Plan:
    (plan,) = make_plans("demo", [device], PlanRequest(target="llamacpp", **request))
    return plan


def card(mebibytes: float) -> DeviceProfile:
    """A graphics card with this much memory for models."""
    profile, reserve = load_profile("rtx-4060"), load_profile("rtx-4060").reserve
    vram = SourcedBytes(value=reserve.value + round(mebibytes * MIB), source="a test", confidence="recalled")
    return profile.model_copy(update={"vram": vram})


def test_all_layers_run_on_a_gpu_that_holds_them() -> None:
    plan = plan_on("rtx-4060")
    assert plan.backend == "cuda" and plan.gpu_layers == most_layers(plan.model) == 7
    assert plan.estimate.kv_bytes == 0 and plan.estimate.private_weights_bytes == 0
    assert describe(plan) == "7 of 7 (cuda; never run by us)"


def test_a_smaller_gpu_takes_the_most_layers_that_fit() -> None:
    numbers = []
    for mebibytes in (4, 16, 18, 20, 22, 24, 26):
        plan = plan_on(card(mebibytes))
        room, layers = round(mebibytes * MIB), plan.gpu_layers
        assert layers is not None and plan.estimate.gpu_bytes is not None and plan.estimate.gpu_bytes <= room
        if layers < most_layers(plan.model):
            with pytest.raises(DoesNotFit, match="on the GPU"):
                plan_on(card(mebibytes), gpu_layers=layers + 1, context=plan.context, kv_bits=plan.storage.kv_bits)
        numbers.append(layers)
    assert numbers == sorted(numbers) and numbers[0] == 0 and numbers[-1] == 7 and len(set(numbers)) > 3


def test_memory_is_divided_and_nothing_of_it_is_lost() -> None:
    none, half, every = (plan_on("rtx-4060", gpu_layers=layers) for layers in (0, 4, 7))
    assert none.estimate.gpu_bytes == 0
    assert none.estimate.kv_bytes == 2 * half.estimate.kv_bytes > every.estimate.kv_bytes == 0
    for plan in (half, every):
        assert plan.estimate.gpu_bytes is not None
        # The tied embedding and the buffers are on both sides; copies for the processor's kernels on neither.
        held = plan.estimate.gpu_bytes - plan.estimate.activation_bytes + plan.estimate.kv_bytes
        held += plan.estimate.mapped_weights_bytes
        assert held > none.estimate.kv_bytes + none.estimate.mapped_weights_bytes
    assert every.estimate.total_bytes < half.estimate.total_bytes < none.estimate.total_bytes


def test_metal_maps_the_layers_and_others_copy_them_into_shared_memory() -> None:
    metal, jetson = plan_on("mac-mini-m4-16gb"), plan_on("jetson-orin-nano-8gb")
    assert metal.backend == "metal" and jetson.backend == "cuda"
    for plan in (metal, jetson):
        assert plan.gpu_layers == 7 and plan.estimate.gpu_bytes is None and plan.estimate.kv_bytes > 0
    assert metal.estimate.private_weights_bytes == 0 < jetson.estimate.private_weights_bytes
    assert jetson.estimate.mapped_weights_bytes < metal.estimate.mapped_weights_bytes


@pytest.mark.parametrize(
    ("target", "device", "layers", "allowed"),
    [
        ("llamacpp", "laptop-x86-8gb", 1, "at most 0"),
        ("llamacpp", "rtx-4060", 8, "at most 7"),
        ("llamacpp", "mac-mini-m4-16gb", 9, "at most 7"),
        # None is a choice too, which onnx on CUDA would not follow.
        ("onnx", "rtx-4060", 0, "only where the target divides layers"),
        ("onnx", "rtx-4060", 1, "only where the target divides layers"),
    ],
)
def test_a_number_that_is_impossible_is_refused(target: str, device: str, layers: int, allowed: str) -> None:
    with pytest.raises(DoesNotFit, match=f"GPU layers {layers}, allowed {allowed}"):
        make_plans("demo", [device], PlanRequest(target=target, gpu_layers=layers))


def test_a_processor_alone_has_no_gpu_layers() -> None:
    plan = plan_on("laptop-x86-8gb")
    assert plan.gpu_layers == 0 and plan.estimate.gpu_bytes is None and describe(plan) is None


def test_the_runtime_and_a_changed_plan_divide_alike() -> None:
    plan = plan_on("rtx-4060", gpu_layers=3)
    run = RunConfig(kv_config=plan.storage, policy=plan.cache, sequences=plan.sequences)
    assert estimate_of(plan, run, memory_terms) == plan.estimate
    assert with_facts(plan, memory_terms, plan.memory).estimate == plan.estimate
    alone = plan.model_copy(update={"gpu_layers": 0})
    assert estimate_of(alone, run, memory_terms).private_bytes > plan.estimate.private_bytes
