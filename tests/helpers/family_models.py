"""Tiny random models of every family, as folders, neutral weights, plans and the reference's answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from edgekit.common.content_store import ContentStore
from edgekit.contracts.engine import Chunk, Engine, State
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Estimate, MemoryFacts, Plan, Quality, Speed
from edgekit.contracts.recipe import Recipe, named_recipe
from edgekit.model.families import model_from_config
from edgekit.model.head_spec import HeadSpec
from edgekit.model.spec import ModelSpec
from edgekit.quant.pipeline import neutral_weights

Families = dict[str, tuple[str, dict[str, Any]]]  # name → (transformers' model type, its config)
_TINY = yaml.safe_load((Path(__file__).parents[1] / "data/tiny_families.yaml").read_text())
SMALL: dict[str, Any] = _TINY["small"]


def _of(group: str) -> Families:
    configs = {name: {**SMALL, **own} for name, own in _TINY[group].items()}
    return {name: (config.pop("model_type"), config) for name, config in configs.items()}


FAMILIES, RECURRENT, SHARING, EXPERTS = map(_of, ("families", "recurrent", "sharing", "experts"))
HYBRID_EXPERTS = _of("hybrid experts")
TWISTED: list[str] = _TINY["twisted"]
EVERY = FAMILIES | RECURRENT | SHARING | EXPERTS | HYBRID_EXPERTS
ONE_LAYER, WIDE_HEADS = "one layer", "wide heads"
OF_TARGETS: dict[str, Families] = {
    "onnx": EVERY,
    "mlx": EVERY | _of("mlx"),
    "executorch": FAMILIES,
    "llamacpp": {name: FAMILIES[name] for name in _TINY["of llamacpp too"]} | _of("llamacpp"),
}


def write_model(folder: Path, kind: str, config: dict[str, Any], seed: int = 0) -> None:
    """A folder as `save_pretrained` writes it, with norms and biases that are not trivial."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).to(torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or name.endswith((".bias", "proj_bias")):
                value.add_(torch.randn_like(value) * 0.1)
            if name.endswith("gate_up_proj") and kind == "gpt_oss" and "swiglu_limit" not in config:
                value.mul_(4.0)  # beyond the usual limit
            if name.endswith("sinks"):
                value.copy_(torch.randn_like(value))
            if "q_norm" in name and kind == "gemma4_text":
                value.mul_(0.3)  # without a factor on scores, random heads are sharper than trained ones
        for name, value in model.named_buffers():
            if name.endswith(("layer_scalar", "expert_bias")):
                value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(folder)


def spec_of(folder: Path) -> ModelSpec:
    return model_from_config(json.loads((folder / "config.json").read_text()), folder.name, str(folder))


def weights_of(folder: Path, recipe: Recipe | str, store: Path) -> NeutralWeights:
    chosen = named_recipe(recipe) if isinstance(recipe, str) else recipe
    return neutral_weights(folder, chosen, store=ContentStore(store))


def reference_of(folder: Path, weights: NeutralWeights) -> Any:
    """transformers' own model, with the dequantised weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        kept = ("layer_scalar", "expert_bias")
        scalars = ((name, value) for name, value in model.named_buffers() if name.endswith(kept))
        for name, value in (*model.named_parameters(), *scalars):
            value.copy_(torch.from_numpy(_stored(weights, name)))
    return model.eval()


def _stored(weights: NeutralWeights, name: str) -> np.ndarray[Any, Any]:
    """A parameter of transformers' model, which holds all experts of a layer in one."""
    block, _, part = name.partition(".experts.")
    layer = block.rpartition(".")[0]
    if not part and ".mlp.gate.weight" in name and weights.model.family == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if not part:
        return np.array(weights.tensor(name))
    experts = weights.model.experts
    assert experts is not None
    if experts.layout == "stacks":
        return _stack(weights, layer, part)
    found = []
    for expert in range(experts.count):
        gate, up, down = (weights.tensor(f"{layer}.{module}.weight") for module in experts.modules(expert))
        found.append(down if part == "down_proj" else np.concatenate([gate, up]))
    return np.stack(found)


def _stack(weights: NeutralWeights, layer: str, part: str) -> np.ndarray[Any, Any]:
    """A stack of gpt-oss: [experts, inputs, outputs], or biases; outputs of gate and up alternate."""
    experts = weights.model.experts
    assert experts is not None
    kind = "bias" if part.endswith("_bias") else "weight"
    chosen = slice(2, 3) if part.startswith("down") else slice(0, 2)
    found = []
    for expert in range(experts.count):
        mine = [weights.tensor(f"{layer}.{module}.{kind}") for module in experts.modules(expert)[chosen]]
        found.append(np.stack(mine, axis=1).reshape(-1, *mine[0].shape[1:]).T)
    return np.stack(found)


def plan_for(
    model: ModelSpec,
    recipe: Recipe,
    *,
    context: int = 128,
    capacity: int | None = None,
    sequences: int = 4,
    chunk_tokens: int = 64,
    kv_bits: int = 32,
    exits: tuple[int, ...] = (),
    backend: str = "cpu",
    threads: int = 1,
    drafter: HeadSpec | None = None,
) -> Plan:
    return Plan(
        model=model,
        model_source="test",
        model_sha256="0" * 64,
        device="this",
        device_sha256="0" * 64,
        os_version="0",
        target="onnx",
        backend=backend,
        recipe=recipe,
        context=context,
        sequences=sequences,
        chunk_tokens=chunk_tokens,
        cache=KVEvictionPolicy(),
        storage=KVCacheConfig(capacity_tokens=capacity or context, kv_bits=kv_bits),
        exits=exits,
        drafter=drafter,
        threads=threads,
        estimate=Estimate(
            mapped_weights_bytes=0, private_weights_bytes=0, kv_bytes=0, activation_bytes=0, runtime_bytes=0
        ),
        memory=MemoryFacts(runtime_bytes=0, source="none"),
        budget_bytes=0,
        budget_why="a test",
        speed=Speed(prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0, first_token_s=1.0, basis="none"),
        quality=Quality(kl=0.0, same_top=1.0, basis="prior", source="none"),
    )


def quiet(done: float, total: float, what: str) -> None:
    """A progress callback that does nothing."""


def logits_of(reference: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """[token, vocabulary] of the whole text at once."""
    import torch

    with torch.no_grad():
        found: np.ndarray[Any, Any] = reference(torch.tensor([tokens])).logits[0].numpy()
    return found


def greedy_text(engine: Engine, state: State, prompt: Sequence[int], *, first: int = 0) -> list[int]:
    """Return the prompt, of which `first` tokens are fed alone, and 64 tokens that the engine chooses greedily."""
    text = list(prompt)
    if first:
        engine.forward([Chunk(state, text[:first], 0)])
    logits = engine.forward([Chunk(state, text[first:], 1)])[0]
    for _ in range(64):
        text = [*text, int(logits[-1].argmax())]
        logits = engine.forward([Chunk(state, text[-1:], 1)])[0]
    return text


def tokens_of(count: int, vocabulary: int = 160, seed: int = 7) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocabulary, count)]
