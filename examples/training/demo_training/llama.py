"""A Llama, as plainly as it trains fast: its parameters carry the names of Hugging Face checkpoints.

It reads and writes only `config.json` and `model.safetensors`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EOS, BOS, PAD, ASSISTANT, END = 0, 1, 2, 5, 6


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama with tied embeddings and no biases."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    max_positions: int = 2048
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0

    @staticmethod
    def read(folder: Path) -> Shape:
        """The shape that a folder's `config.json` states; refuses what `Llama` cannot compute."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
        plain = config.get("model_type") == "llama" and config.get("tie_word_embeddings") is True
        if not plain or rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
            raise SystemExit(f"{folder}: not a Llama with tied embeddings and a plain rope, so it cannot be continued")
        return Shape(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
            feed_forward=config["intermediate_size"],
            max_positions=config["max_position_embeddings"],
            norm_epsilon=config["rms_norm_eps"],
            rope_theta=float(rope["rope_theta"]),
        )

    def config(self) -> dict[str, Any]:
        """`config.json`, with the rope in the spelling of transformers 5 and in the older one."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": BOS,
            "dtype": "float16",
            "eos_token_id": EOS,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.feed_forward,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": PAD,
            "pretraining_tp": 1,
            "rms_norm_eps": self.norm_epsilon,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self.vocabulary,
        }

    def as_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden))
        self.epsilon = shape.norm_epsilon

    def forward(self, values: Tensor) -> Tensor:
        return functional.rms_norm(values, self.weight.shape, self.weight, self.epsilon)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, _ = values.shape
        q, k, v = (
            project(values).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _turn(q, cosine, sine), _turn(k, cosine, sine)
        mixed = _attend_plainly(q, k, v) if q.device.type == "cpu" else _attend(q, k, v)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(values)) * self.up_proj(values))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(shape), Attention(shape)
        self.post_attention_layernorm, self.mlp = Norm(shape), FeedForward(shape)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosine, sine)
        fed: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + fed


class Llama(nn.Module):
    """Maps tokens [batch, length] to logits [batch, length, vocabulary]; positions count from 0."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
        angles = torch.arange(shape.max_positions, dtype=torch.float64)[:, None] * inverse
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        length = tokens.shape[1]
        for layer in self.layers:
            hidden = layer(hidden, self.cosine[:length], self.sine[:length])
        logits: Tensor = functional.linear(self.norm(hidden), self.embed_tokens.weight)
        return logits

    def parameters_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Draw normal weights; those that write into the residual stream are smaller, the more layers write into it."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                deviation = 0.02 / (2 * self.shape.layers) ** 0.5 if into_stream else 0.02
                parameter.normal_(0.0, deviation, generator=generator)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; query heads share the key heads in runs."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def _attend_plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as plain products: torch's fused kernel takes twice as long to train through on a CPU.

    A quarter of the queries at a time, which meet no key after their end: a third fewer products than with all.
    """
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    q = q * q.shape[-1] ** -0.5
    mixed, block = [], -(-q.shape[2] // 4)
    for start in range(0, q.shape[2], block):
        rows = q[:, :, start : start + block]
        end = start + rows.shape[2]
        later = torch.full((rows.shape[2], end), float("-inf"), dtype=q.dtype).triu(1 + start)
        scores = rows @ k[:, :, :end].transpose(-1, -2) + later
        mixed.append(scores.softmax(-1) @ v[:, :, :end])
    return torch.cat(mixed, 2)


def _turn(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions, the first half of a head against its second half."""
    first, second = values.chunk(2, -1)
    cosine, sine = cosine.to(values.dtype), sine.to(values.dtype)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def checkpoint_tensors(model: Llama) -> dict[str, Tensor]:
    """The weights by their names in a Hugging Face checkpoint; the head is the embedding, so it is not stored."""
    return {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def read_model(folder: Path) -> Llama:
    """The model that stands in a Hugging Face folder, in float32."""
    from safetensors.torch import load_file

    model = Llama(Shape.read(folder))
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in stored.items()})
    return model
