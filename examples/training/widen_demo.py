"""The demo model at the cost of one of half a billion parameters: wider and deeper, with the same function.

Every added dimension is zero, every added layer adds nothing, and norms are rescaled for the zeros that they now count,
so that speculation can be timed on a target of realistic cost whose draft is a trained one. Needs `edgekit[quantize]`.

    python -m examples.training.widen_demo OUT [--times 4] [--intermediate 4096] [--layers 20]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SOURCE = Path(__file__).parent / "demo" / "target"


def widen(out: Path, *, factor: int, intermediate: int, layers: int) -> int:
    """Write the model, `factor` times as wide, to `out`; how many parameters it has."""
    config = json.loads((SOURCE / "config.json").read_text())
    hidden = factor * config["hidden_size"]
    if intermediate < config["intermediate_size"] or layers < config["num_hidden_layers"]:
        raise SystemExit("a wider model has no fewer layers and no smaller ones")
    heads, kv_heads = config["num_attention_heads"] * factor, config["num_key_value_heads"] * factor
    head_dim = config["head_dim"]
    shapes = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    old: dict[str, torch.Tensor] = load_file(SOURCE / "model.safetensors")
    new = {
        "model.embed_tokens.weight": padded(old["model.embed_tokens.weight"], (config["vocab_size"], hidden)),
        # The mean of squares now counts the zeros: it is smaller by the factor, its root by the root.
        "model.norm.weight": padded(old["model.norm.weight"], (hidden,)) * factor**-0.5,
    }
    for layer in range(layers):
        for name, shape in shapes.items():
            key = f"model.layers.{layer}.{name}.weight"
            source = old.get(key)
            norm = name.endswith("layernorm")
            if source is None:
                like = old["model.norm.weight"]
                new[key] = torch.ones(shape, dtype=like.dtype) if norm else random_or_zero(name, shape, like)
            else:
                new[key] = padded(source, shape) * (factor**-0.5 if norm else 1.0)
    config |= {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": config["rms_norm_eps"] / factor,
    }
    out.mkdir(parents=True)
    for path in SOURCE.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: value.contiguous() for name, value in new.items()}, out / "model.safetensors", {"format": "pt"})
    return sum(value.numel() for value in new.values())


def padded(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The values in the corner of a larger tensor of zeros."""
    wide = torch.zeros(shape, dtype=value.dtype)
    wide[tuple(slice(0, size) for size in value.shape)] = value
    return wide


def random_or_zero(name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """An added layer computes, and then adds nothing: what leads back into the residual is zero."""
    if name.endswith(("o_proj", "down_proj")):
        return torch.zeros(shape, dtype=like.dtype)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.02).to(like.dtype)


def main() -> None:
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    # The root of a power of four is exact, and so are the norms.
    parser.add_argument("--times", type=int, default=4, choices=(1, 4, 16))
    for name, size in (("intermediate", 4096), ("layers", 20)):
        parser.add_argument(f"--{name}", type=int, default=size)
    asked = parser.parse_args()
    count = widen(asked.out, factor=asked.times, intermediate=asked.intermediate, layers=asked.layers)
    print(f"{asked.out}: {count / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main()
