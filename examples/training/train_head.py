"""Train an EAGLE-3 head for a model from what it writes itself, in the published layout.

    python -m examples.training.train_head --model demo --out build/head --minutes 8
    edgekit export demo --target onnx --drafter build/head/head -o demo.edgekit

The same command goes on with a run that was killed. Needs torch and transformers; see `--help`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import log_softmax

from edgekit.model.eagle3 import default_layers
from examples.training.head_training.head import Head, HeadShape
from examples.training.head_training.outputs import BATCH, LENGTH, collect, prompts, read, texts
from examples.training.head_training.target import open_target

_ROWS = 4  # texts in a step
_CHECKPOINT_S = 60.0


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    _same_settings(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer, tokenizer_file = open_target(options.model)
    model, config = model.to(device), model.config
    layers = tuple(options.layers or _layers(config.num_hidden_layers))
    batches = prompts(
        tokenizer, texts(options.text, tokenizer), options.tokens // LENGTH, options.prompt_tokens, options.seed
    )
    files = collect(model, batches, layers, options.out / "outputs", options.seed)
    kept = _draft_vocabulary(files, config.vocab_size, options.draft_vocabulary)
    shape = HeadShape(
        config.hidden_size, options.inner or config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        config.vocab_size, len(kept), layers, config.rms_norm_eps, config.rope_parameters["rope_theta"],
        config.max_position_embeddings,
    )  # fmt: skip
    head = _begun(shape, model, kept).to(device)
    embedding, output = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()[kept]
    figures = _train(head, files, embedding, output, kept.to(device), options, device)
    _write(head, kept, figures, options.out, tokenizer_file)
    print(json.dumps(figures))


def _layers(count: int) -> tuple[int, ...]:
    """The usual layers; spread over a model that is too small for them."""
    return default_layers(count) if count >= 8 else (1, count // 2, count - 1)


def _same_settings(options: argparse.Namespace) -> None:
    """Refuse to go on with a run of other settings."""
    names = ("model", "text", "tokens", "prompt_tokens", "layers", "draft_vocabulary", "inner", "seed")
    settings = {name: str(getattr(options, name)) for name in names}
    options.out.mkdir(parents=True, exist_ok=True)
    place = options.out / "settings.json"
    if place.exists() and json.loads(place.read_text()) != settings:
        raise SystemExit(f"{place}: made with other settings; give the same options, or another --out")
    place.write_text(json.dumps(settings, indent=1))


def _draft_vocabulary(files: list[Path], vocabulary: int, most: int) -> Tensor:
    """The tokens that the target writes most often, in the order of their ids."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for path in files:
        counts += torch.bincount(read(path, torch.device("cpu"))["tokens"].flatten(), minlength=vocabulary)
    kept = counts.topk(min(most, vocabulary)).indices.sort().values
    print(f"draft vocabulary: {len(kept):,} tokens, {counts[kept].sum() / counts.sum():.1%} of what was written")
    return kept


def _begun(shape: HeadShape, model: Any, kept: Tensor) -> Head:
    """A head that begins as the target's last layer and head, on the last of the hidden states that it reads."""
    head, last = Head(shape), model.model.layers[-1]
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -shape.hidden :] = torch.eye(shape.hidden)
        head.norm.weight.copy_(model.model.norm.weight)
        head.lm_head.weight.copy_(model.lm_head.weight[kept])
        if head.midlayer.mlp.gate_proj.weight.shape == last.mlp.gate_proj.weight.shape:
            head.midlayer.mlp.load_state_dict(last.mlp.state_dict())
            head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        for name in ("q_proj", "k_proj", "v_proj"):
            mine, theirs = getattr(head.midlayer.self_attn, name).weight, getattr(last.self_attn, name).weight
            mine[:, : shape.hidden] *= 0.5
            mine[:, shape.hidden :] = theirs
        head.midlayer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
    return head


def _train(
    head: Head, files: list[Path], embedding: Tensor, output: Tensor, kept: Tensor, options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Train for the minutes that are left; return the figures on the last batch, which is held out."""
    place = options.out / "checkpoint.pt"
    optimiser = torch.optim.AdamW(head.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.01)
    spent, step = 0.0, 0
    if place.exists():
        state = torch.load(place, weights_only=True, map_location=device)
        head.load_state_dict(state["head"])
        optimiser.load_state_dict(state["optimiser"])
        spent, step = state["spent_s"], state["step"]
        print(f"resumed after {spent:.0f} s and {step} steps", flush=True)
    held_out = read(files[-1], device)
    limit, train_files, saved = options.minutes * 60, files[:-1] or files, time.monotonic()
    texts_of: dict[str, Tensor] = {}
    while spent < limit:
        started = time.monotonic()
        place_in_file = step % (BATCH // _ROWS)
        if place_in_file == 0 or not texts_of:
            epoch, index = divmod(step // (BATCH // _ROWS), len(train_files))
            order = torch.randperm(len(train_files), generator=torch.Generator().manual_seed(epoch)).tolist()
            texts_of = read(train_files[order[index]], device)
        rows = {name: value[place_in_file * _ROWS : (place_in_file + 1) * _ROWS] for name, value in texts_of.items()}
        for group in optimiser.param_groups:
            group["lr"] = (
                options.rate * min(1.0, (step + 1) / 30) * (0.05 + 0.95 * math.cos(spent / limit * math.pi / 2))
            )
        loss, _ = _loss(head, rows, embedding, output, kept, options.steps)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        step, spent = step + 1, spent + time.monotonic() - started
        if step % 20 == 0:
            print(f"step {step}, {spent:.0f} s: loss {loss.item():.3f}", flush=True)
        if time.monotonic() - saved > _CHECKPOINT_S or spent >= limit:
            state = {"head": head.state_dict(), "optimiser": optimiser.state_dict(), "spent_s": spent, "step": step}
            torch.save(state, place.with_suffix(".part"))
            place.with_suffix(".part").replace(place)
            saved = time.monotonic()
    with torch.no_grad():
        loss, right = _loss(head, held_out, embedding, output, kept, options.steps)
    return {
        "steps": step, "seconds": round(spent), "held_out_loss": round(loss.item(), 4),
        "same_top_token_by_place": [round(share, 4) for share in right], "tokens": len(train_files) * BATCH * LENGTH,
    }  # fmt: skip


def _loss(
    head: Head, rows: dict[str, Tensor], embedding: Tensor, output: Tensor, kept: Tensor, steps: int
) -> tuple[Tensor, list[float]]:
    """The cross entropy with the target's distribution over the draft vocabulary, and the share of equal top tokens."""
    logits = head(embedding[rows["tokens"]], rows["hidden"], steps)
    total, right = torch.zeros((), device=kept.device), []
    wanted = (rows["last"] @ output.T).softmax(-1)
    for step, found in enumerate(logits):
        expected, found = wanted[:, 1 + step :], found[:, : found.shape[1] - 1 - step]
        total = total - 0.9**step * (expected * log_softmax(found, -1)).sum(-1).mean()
        right.append((found.argmax(-1) == expected.argmax(-1)).float().mean().item())
    return total / steps, right


def _write(head: Head, kept: Tensor, figures: dict[str, Any], out: Path, tokenizer_file: Path) -> None:
    """Write the head as `LlamaForCausalLMEagle3`, with the target's tokenizer."""
    folder, shape = out / "head", head.shape
    folder.mkdir(exist_ok=True)
    tensors = {name: value.detach().bfloat16().contiguous().cpu() for name, value in head.state_dict().items()}
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(shape.vocabulary, dtype=torch.bool).index_fill(0, kept, True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocabulary,
        "draft_vocab_size": shape.draft_vocabulary, "rms_norm_eps": shape.epsilon, "rope_theta": shape.theta,
        "max_position_embeddings": shape.positions, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(shape.layers)},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shutil.copyfile(tokenizer_file, folder / "tokenizer.json")
    (out / "figures.json").write_text(json.dumps({**figures, "shape": asdict(shape)}, indent=1))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an EAGLE-3 head; the same command goes on with a killed run.")
    add = parser.add_argument
    add("--model", required=True, help="a Llama-like model: a folder, a GGUF file, a hub id or `demo`")
    add("--out", type=Path, required=True, help="folder of the run: outputs/, checkpoint.pt, then head/")
    add("--minutes", type=float, required=True, help="minutes of training, beside those in which the model writes")
    add("--tokens", type=int, default=200_000, help="tokens of the texts to learn from (200000)")
    add("--prompt-tokens", type=int, default=48, help=f"of {LENGTH} of each text; the model writes the rest (48)")
    add(
        "--text",
        type=Path,
        help="a folder of texts, or lines of JSON (`text`, or the `messages` of a chat); else Python's library",
    )
    add("--layers", type=int, nargs="+", help="the target's layers whose hidden states are read")
    add("--draft-vocabulary", type=int, default=32_000, help="tokens that the head can propose, at most (32000)")
    add("--inner", type=int, help="width of the feed-forward; else the target's")
    add("--steps", type=int, default=3, help="tokens that each place drafts in training (3)")
    add("--rate", type=float, default=1e-3, help="the highest learning rate")
    add("--threads", type=int, help="CPU threads")
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
