"""A model and a plan for the fake target."""

from __future__ import annotations

from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.memory import MemoryLoad, usual_terms
from edgekit.contracts.plan import MemoryFacts, Plan, Quality, Speed
from edgekit.contracts.recipe import RECIPES
from edgekit.model.parts import Layer, Rope
from edgekit.model.spec import ModelSpec
from edgekit.planner.memory import predict

FAKE = "fake"  # the target's name
MEMORY = MemoryFacts(runtime_bytes=1 << 20, source="nothing is measured: a fake")


def fake_model(*, vocabulary: int = 300, layers: int = 2, eos_ids: tuple[int, ...] = (0,)) -> ModelSpec:
    """Return a small model of the Llama family."""
    return ModelSpec(
        name="fake",
        family="llama",
        hidden_size=64,
        intermediate_size=128,
        heads=2,
        vocab_size=vocabulary,
        layers=(Layer(kv_heads=1, head_dim=32),) * layers,
        ropes={"default": Rope(theta=10000.0, dim=32)},
        max_positions=4096,
        norm_epsilon=1e-5,
        attention_scale=32**-0.5,
        tied=True,
        bos_id=1,
        eos_ids=eos_ids,
    )


def fake_plan(
    model: ModelSpec | None = None,
    *,
    context: int = 512,
    sequences: int = 4,
    chunk_tokens: int = 64,
    cache: KVEvictionPolicy | None = None,
) -> Plan:
    """Return a plan for the fake target, estimated like any other."""
    model, cache, recipe = model or fake_model(), cache or KVEvictionPolicy(), RECIPES["float32"]
    capacity = cache.window or context
    load = MemoryLoad(model, recipe, "cpu", MEMORY, capacity, sequences, kv_bits=16, chunk_tokens=chunk_tokens)
    return Plan(
        model=model,
        model_source="fake",
        model_sha256="0" * 64,
        device="fake",
        device_sha256="0" * 64,
        os_version="1",
        target=FAKE,
        backend="cpu",
        recipe=recipe,
        context=context,
        sequences=sequences,
        chunk_tokens=chunk_tokens,
        cache=cache,
        storage=KVCacheConfig(capacity_tokens=capacity, kv_bits=16),
        threads=1,
        estimate=predict(load, usual_terms),
        memory=MEMORY,
        budget_bytes=1 << 40,
        budget_why="a fake device",
        speed=Speed(prefill_tokens_per_s=None, decode_tokens_per_s=1.0, first_token_s=None, basis="a fake"),
        quality=Quality(kl=0.0, same_top=1.0, basis="prior", source="a fake"),
    )
