"""Train the demo pair: a target of about 11 million parameters and a draft of about one, with one tokenizer.

    python -m examples.training.train_demo --out build/pair --minutes 30             # on a GPU where there is one
    python -m examples.training.train_demo --out build/pair --minutes 30 --resume    # after it was killed

It reads the standard library and the installed packages that state a permissive licence, so what is installed is what
it learns from. Needs torch; see `--help`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from edgekit.common.files import write_file
from examples.training.demo_training import corpus, tokens
from examples.training.demo_training.evaluation import held_out_figures
from examples.training.demo_training.llama import Llama, Shape
from examples.training.demo_training.publishing import MAX_BYTES, Trained, card, write_model
from examples.training.demo_training.training import Pace, Stage, fresh_or_continued


@dataclass(frozen=True)
class Preset:
    target: Shape
    draft: Shape
    pace: Pace


def presets() -> dict[str, Preset]:
    demo = Pace(None, None, batch_windows=32, micro_windows=16, rate=4e-3, warmup_steps=100)
    tiny = Pace(None, None, batch_windows=8, micro_windows=4, rate=5e-3, warmup_steps=5, length=64, ending_length=128)
    return {
        "demo": Preset(Shape(4096, 384, 6, 6, 2, 64, 1024), Shape(4096, 128, 2, 2, 1, 64, 352), demo),
        "tiny": Preset(Shape(512, 64, 2, 2, 1, 32, 128), Shape(512, 32, 1, 1, 1, 32, 64), tiny),
    }


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    device, bf16 = _device(options.device, options.dtype)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    preset, out = presets()[options.preset], options.out
    _prepare_data(options, preset, out)
    vocabulary = tokens.read_tokenizer(out / "data").get_vocab_size()
    row = np.load(out / "data" / "train.npy", mmap_mode="r")
    pace = replace(
        preset.pace,
        tokens=options.tokens,
        batch_windows=options.batch or preset.pace.batch_windows,
        micro_windows=options.micro or preset.pace.micro_windows,
        rate=options.rate or preset.pace.rate,
        warmup_steps=options.warmup if options.warmup is not None else preset.pace.warmup_steps,
        decay=options.decay,
        matrices=options.matrices,
        checkpoint_minutes=options.checkpoint_minutes,
        seed=options.seed,
    )
    minutes = options.minutes
    share = options.draft_share
    starts = {
        "target": (preset.target, options.init_from, minutes and minutes * (1 - share), options.tokens),
        "draft": (preset.draft, options.init_draft_from, minutes and minutes * share, options.draft_tokens),
    }
    done: dict[str, tuple[Llama, Stage]] = {}
    for name, (shape, init_from, limit, count) in starts.items():
        model = fresh_or_continued(shape, init_from, options.seed)
        if model.shape.vocabulary < vocabulary:
            wanted = f"{name} has a vocabulary of {model.shape.vocabulary}, the tokenizer one of {vocabulary}"
            raise SystemExit(f"{wanted}; give --tokenizer, or weights, that belong together")
        own = replace(pace, minutes=limit, tokens=count or options.tokens)
        stage = Stage(name, model, own, out / "checkpoints", device, bf16, options.compile)
        if stage.resume():
            print(f"resumed {stage.where()}", flush=True)
        if not stage.train(row, done["target"][0].eval() if name == "draft" else None):
            print(f"stopped {stage.where()}; go on with --resume", flush=True)
            return
        done[name] = (model, stage)
    begun_with = {name: init_from for name, (_, init_from, _, _) in starts.items()}
    _publish(out, done, begun_with)


def _prepare_data(options: argparse.Namespace, preset: Preset, out: Path) -> None:
    """Make the data, or take the data of the run that goes on."""
    summary = out / "data" / "sources.json"
    tokenizer = options.tokenizer or (options.init_from / "tokenizer.json" if options.init_from else None)
    settings = tokens.Settings(
        vocabulary=preset.target.vocabulary,
        max_characters=options.max_characters,
        chat_share=options.chat_share,
        held_out_one_in=options.held_out_one_in,
        seed=options.seed,
        corpus=_place(options.corpus),
        tokenizer=_place(tokenizer),
        held_out=_place(options.held_out),
    )
    if summary.exists():
        if not options.resume:
            raise SystemExit(f"{out}: holds a run already; --resume goes on with it, another --out starts anew")
        if json.loads(summary.read_text())["settings"] != asdict(settings):
            raise SystemExit(f"{summary}: made with other settings; give the same options, or another --out")
        return
    sources = corpus.in_folder(options.corpus) if options.corpus else corpus.installed()
    tokens.prepare(out / "data", sources, settings)
    made = json.loads(summary.read_text())
    size, chats = made["tokens"] / 1e6, made["chat_tokens"] / 1e6
    print(f"data: {made['files']:,} files, {size:.2f} M tokens, {chats:.2f} M of them conversations", flush=True)


def _place(path: Path | None) -> str | None:
    return str(path.resolve()) if path else None


def _publish(out: Path, done: dict[str, tuple[Llama, Stage]], begun_with: dict[str, Path | None]) -> None:
    data = out / "data"
    torch.set_float32_matmul_precision("highest")
    models = {
        name: Trained(model.float().eval(), stage.progress.tokens, begun_with[name])
        for name, (model, stage) in done.items()
    }
    target, draft = (models[name].model for name in ("target", "draft"))
    figures = held_out_figures(target, draft, tokens.read_tokenizer(data), tokens.read_texts(data / "held_out.jsonl"))
    tokenizer = (data / "tokenizer.json").read_bytes()
    size = sum(write_model(out / name, trained, tokenizer) for name, trained in models.items())
    if size > MAX_BYTES:
        raise SystemExit(f"{out}: {size:,} bytes of weights; the pair may take at most {MAX_BYTES:,}")
    sources = json.loads((data / "sources.json").read_text())
    write_file(out / "figures.json", (json.dumps(figures, indent=2) + "\n").encode())
    pace = done["target"][1].pace
    lengths = f"trained at {pace.length}, at the end at {pace.ending_length}"
    write_file(out / "README.md", card(models, figures, sources, lengths).encode())
    print("\n".join(f"{name}: {value:.4g}" for name, value in figures.items()))
    print(f"wrote {out}/target and {out}/draft, {size / 1e6:.1f} MB of weights")


def _device(name: str, dtype: str) -> tuple[torch.device, bool]:
    """The device, and whether matrices are multiplied in bf16: where the hardware does that faster."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if dtype != "auto":
        return device, dtype == "bf16"
    if device.type == "cuda":
        return device, torch.cuda.is_bf16_supported()
    features = torch.cpu.get_capabilities()
    return device, bool(device.type == "cpu" and (features.get("avx512_bf16") or features.get("amx_bf16")))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo pair; a run that was killed goes on with --resume.")
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        required=True,
        help="folder of the run: data/, checkpoints/, then target/, draft/, README.md",
    )
    add("--resume", action="store_true", help="go on with the run in --out, from its last checkpoint")
    add("--preset", choices=sorted(presets()), default="demo")
    add("--minutes", type=float, help="minutes of training, both models together")
    add("--tokens", type=int, help="tokens of training for the target, and for the draft unless --draft-tokens")
    add("--draft-tokens", type=int)
    add("--draft-share", type=float, default=0.2, help="the draft's share of --minutes (0.2)")
    add("--device", default="auto", help="cuda, cpu, mps; auto takes a GPU where there is one")
    add("--dtype", choices=["auto", "bf16", "fp32"], default="auto", help="of matrix products; weights stay in fp32")
    add("--compile", action="store_true", help="torch.compile it; on a CPU, with a C++ compiler, half as fast again")
    add("--threads", type=int, help="CPU threads")
    add(
        "--init-from", type=Path, metavar="DIR", help="continue the target of this folder, with its shape and tokenizer"
    )
    add("--init-draft-from", type=Path, metavar="DIR", help="continue the draft of this folder")
    add("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json to use; otherwise one is trained")
    add("--corpus", type=Path, metavar="DIR", help="learn from the Python files in here, not from what is installed")
    add("--held-out", type=Path, metavar="FILE", help="held_out.jsonl to keep out and to evaluate on; otherwise split")
    add("--held-out-one-in", type=int, default=400, help="hold out one file in so many (400), up to 400,000 characters")
    add("--max-characters", type=int, help="take no more source than this")
    add("--chat-share", type=float, default=0.08, help="share of conversations among the tokens (0.08)")
    add("--batch", type=int, help="windows in a step")
    add("--micro", type=int, help="windows at once; a step adds up the gradients of several")
    add("--rate", type=float, help="the highest learning rate")
    add("--warmup", type=int, help="steps in which the rate rises")
    add("--decay", type=float, default=0.6, help="the part at the end in which the rate falls to zero (0.6)")
    add("--matrices", choices=["muon", "adamw"], default="muon", help="the optimiser of the layers' matrices")
    add("--checkpoint-minutes", type=float, default=5.0)
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not (options.minutes or options.tokens):
        parser.error("say when to end: --minutes, --tokens, or both")
    if not 0 <= options.chat_share < 1 or not 0 < options.draft_share < 1:
        parser.error("--chat-share is 0 or more and below 1, --draft-share between 0 and 1")
    return options


if __name__ == "__main__":
    main()
