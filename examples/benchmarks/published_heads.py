"""Draft logits of small EAGLE-3 heads, made and saved by the libraries that train them, beside the libraries' own.

    pip install --target LIBS --no-deps speculators==0.9.0 specforge==0.2.0 datasets loguru pydantic-settings \
        hs-connectors python-dotenv pyarrow pandas dill multiprocess xxhash python-dateutil six openai
    PYTHONPATH=LIBS python -m examples.benchmarks.published_heads

Each head is random. It is saved by its library, read as `edgekit export --drafter` reads it, and both compute the
logits after a text and after each of three drafted tokens. Then it is handed over as `edgekit handover` does, and
opened by speculators. Prints the largest differences as shares of the largest logit, as JSON.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgekit.artifact.sealed_head import hand_over_head
from edgekit.methods.drafters.head_decoder import HeadDecoder
from edgekit.model.families import model_from_config
from edgekit.model.heads import read_head

VOCABULARY, DRAFTED, TOKENS, LAYERS = 60, 33, 24, [1, 2, 2]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": VOCABULARY, "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "pad_token_id": None,
}  # fmt: skip
TARGET = model_from_config({"model_type": "llama", **SIZES, "num_hidden_layers": 3}, "target", "target")
MOST_APART = 1e-4
STEPS = 4  # after the text, and after each of three drafted tokens
Saved = tuple[Path, list[Any]]  # a folder, and the library's logits [tokens, draft vocabulary] of each step


def filled(model: Any) -> Any:
    """The model with random weights and a random draft vocabulary."""
    draw = torch.Generator().manual_seed(3)
    for values in model.parameters():
        spread = torch.randn(values.shape, generator=draw) * 0.2
        values.data = spread + 1 if values.ndim == 1 else spread
    chosen = torch.randperm(VOCABULARY, generator=draw)[:DRAFTED].sort().values
    model.d2t.copy_(chosen - torch.arange(DRAFTED))
    model.t2d.copy_(torch.isin(torch.arange(VOCABULARY), chosen))
    return model.eval()


def from_speculators(folder: Path, tokens: Any, hidden: Any, kind: str, norms: dict[str, bool]) -> Saved:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    layer = AutoConfig.for_model(kind, **SIZES)
    layer._attn_implementation = "eager"
    greedy = GreedyTokenProposalConfig(speculative_tokens=STEPS - 1)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=DRAFTED, eagle_aux_hidden_state_layer_ids=LAYERS, **norms,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[greedy], default_proposal_method="greedy", verifier=verifier
        ),
    )  # fmt: skip
    model = filled(Eagle3DraftModel(config))
    model.save_pretrained(folder)
    return folder, speculators_logits(model, tokens, hidden)


def speculators_logits(model: Any, tokens: Any, hidden: Any) -> list[Any]:
    found: list[Any] = []
    model.lm_head.register_forward_hook(lambda _, __, logits: found.append(logits[0].numpy()))
    with torch.no_grad():
        model(hidden[None], tokens[None, 1:], torch.zeros(1, len(hidden), dtype=torch.long), ttt_steps=STEPS)
    return found


def handed_over(saved: Saved, tokens: Any, hidden: Any) -> float:
    """The largest difference once the head was handed over for servers and opened by speculators."""
    from safetensors.torch import load_file
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    (folder, theirs), place = saved, saved[0].with_name("handed-over")
    hand_over_head(folder, TARGET, place)
    config = json.loads((place / "config.json").read_text())
    config["transformer_layer_config"]["_attn_implementation"] = "eager"
    model = Eagle3DraftModel(Eagle3SpeculatorConfig.from_dict(config))
    missing, unknown = model.load_state_dict(load_file(place / "model.safetensors"), strict=False)
    assert not unknown and all(name.startswith("verifier_") for name in missing), (missing, unknown)
    found = speculators_logits(model.eval(), tokens, hidden)
    return most_apart(found, theirs)


def from_specforge(folder: Path, tokens: Any, hidden: Any, norms: dict[str, bool]) -> Saved:
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}}
    model = filled(LlamaForCausalLMEagle3(LlamaConfig(**SIZES, draft_vocab_size=DRAFTED, **named, **norms)))
    count, found, cache = len(hidden), list[Any](), [list[Any](), list[Any]()]
    mask = model.prepare_decoder_attention_mask(torch.ones(1, count, dtype=torch.bool), hidden[None], 1, count, 0)
    with torch.no_grad():
        state = model.project_hidden_states(hidden[None])
        for step in range(STEPS):  # as its training does: each step reads the next token of the text
            read = torch.cat([tokens[1 + step :], tokens.new_zeros(step)])
            state = model.backbone(
                input_embeds=model.embed_input_ids(read[None]), hidden_states=state, cache_hidden=cache,
                attention_mask=mask, position_ids=torch.arange(count)[None],
            )  # fmt: skip
            found.append(model.compute_logits(state)[0].numpy())
    model.save_pretrained(folder)
    return folder, found


def heads(tokens: Any, hidden: Any) -> Iterator[tuple[str, Callable[[Path], Saved]]]:
    for kind in ("llama", "qwen3"):
        for norm in (None, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            norms = {norm: True} if norm else {}
            yield (
                f"speculators, {kind}, {norm or 'plain'}",
                lambda to, kind=kind, norms=norms: from_speculators(to, tokens, hidden, kind, norms),  # type: ignore[misc]
            )
    yield "specforge, plain", lambda to: from_specforge(to, tokens, hidden, {})
    yield "specforge, fc_norm", lambda to: from_specforge(to, tokens, hidden, {"fc_norm": True})


def difference(saved: Saved, tokens: Any, hidden: Any) -> float:
    """The largest difference of our logits from the library's."""
    folder, theirs = saved
    decoder = HeadDecoder(read_head(folder, TARGET))
    at = len(hidden) - STEPS  # the newest position from which the text has a token for each step
    cache, positions = decoder.start(64), np.arange(at + 1)
    fed = tokens[1 : at + 2].numpy()
    output = decoder.forward(cache, fed, decoder.combine(hidden[: at + 1].numpy()), positions)
    ours = [decoder.logits(output[-1])]
    for step in range(1, STEPS):
        output = decoder.forward(
            cache, tokens[at + 1 + step : at + 2 + step].numpy(), output[-1:], np.array([at + step])
        )
        ours.append(decoder.logits(output[-1]))
    return most_apart(ours, [logits[at] for logits in theirs])


def most_apart(ours: list[Any], theirs: list[Any]) -> float:
    return float(
        max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) / max(map(np.max, map(np.abs, theirs)))
    )


def main() -> None:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=draw)
    hidden = torch.randn((TOKENS - 1, 3 * SIZES["hidden_size"]), generator=draw)
    found: dict[str, dict[str, float]] = {}
    for name, make in heads(tokens, hidden):
        with tempfile.TemporaryDirectory() as folder:
            saved = make(Path(folder) / "head")
            apart = {"read": difference(saved, tokens, hidden), "handed over": handed_over(saved, tokens, hidden)}
            found[name] = {what: float(f"{value:.2g}") for what, value in apart.items()}
    versions = {name: version(name) for name in ("speculators", "specforge", "transformers", "torch")}
    print(json.dumps({"versions": versions, "largest_difference_of_logits": found}, indent=1))
    if wrong := [name for name, apart in found.items() if not max(apart.values()) < MOST_APART]:
        raise SystemExit(f"draft logits differ: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
