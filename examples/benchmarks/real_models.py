"""Exports real models with every built-in recipe on every target, and measures what each artifact loses and takes.

    python -m examples.benchmarks.real_models --models smollm2 --targets onnx --recipes default s8 --effort quick
    python -m examples.benchmarks.real_models --models demo --tasks hellaswag=100
    python -m examples.benchmarks.real_models --page

Results are written to docs/data/real_models.json as soon as a row is complete; rows that are there are not measured
again. The row `default` is `edgekit export MODEL --device this --target TARGET` and nothing else. KL, equal top tokens
and perplexity come from held-out text (examples/benchmarks/held_out) that nothing is calibrated on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from edgekit import plugins
from edgekit.common.files import write_output
from edgekit.contracts.recipe import NATIVE_RECIPES, RECIPES
from edgekit.testing.real_models import gemma3, smollm2
from examples.benchmarks.process_memory import HighWater

Row = dict[str, Any]

ROOT = Path(__file__).parents[2]
HELD_OUT = Path(__file__).parent / "held_out"
DATA, PAGE = ROOT / "docs" / "data" / "real_models.json", ROOT / "docs" / "evidence" / "real_models.md"
BEGIN, END = "<!-- tables: written by examples/benchmarks/real_models.py -->", "<!-- end of tables -->"

MODELS: dict[str, Callable[[], str | Path]] = {"smollm2": smollm2, "gemma3": gemma3, "demo": lambda: "demo"}
DEFAULT = "default"
KINDS = ("code", "prose")
CONTEXT = 1024
# Tokens of held-out text of each kind, and of the context that is filled. MLX on a processor is fifty times slower.
TOKENS = {"onnx": 1024, "executorch": 1024, "mlx": 192}
FILLED = {"onnx": 1024, "executorch": 1024, "mlx": 160}
ANSWER_TOKENS = 32
MOST_LOAD = 3.0  # beside more work a speed says nothing, and is not shown
TRIALS = {"onnx": 3, "executorch": 3, "mlx": 1}
ASKED = ("model", "target", "recipe", "effort")  # what tells rows apart


def measure(row: Row, tasks: Iterable[str]) -> Row:
    """Export one artifact and measure it; a refusal is a result too."""
    model, target, recipe = MODELS[row["model"]](), row["target"], row["recipe"]
    if why := plugins.load_target(target).missing():
        raise SystemExit(f"{target}: {why}")
    options = ["--device", "this", "--target", target]
    if recipe != DEFAULT:
        options += ["--recipe", recipe, "--context", str(CONTEXT)]
    if row["effort"] != DEFAULT:
        options += ["--effort", row["effort"]]
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / f"{row['model']}-{target}"
        done = edgekit("export", model, *options, "-o", artifact)
        if done.returncode:
            return row | {"refused": (done.stderr.strip().splitlines() or ["no message"])[-1]}
        manifest = json.loads((artifact / "manifest.json").read_text())
        row = row | {
            "refused": None,
            "self_check": manifest["self_check"],
            "stored_as": manifest["plan"]["recipe"]["name"],
            "method": manifest["plan"]["quantisation"]["method"],
            "bytes": sum(file["bytes"] for file in manifest["files"].values()),
            "quality": {kind: quality(artifact, kind, TOKENS[target]) for kind in KINDS},
            "run": run(artifact, target),
            "tasks": {},
        }
        row["bits_per_weight"] = row["quality"]["code"].pop("bits_per_weight")
        return row | {"tasks": {task: answered(artifact, *task.split("=")) for task in tasks}}


def edgekit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgekit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def answer_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)}\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def quality(artifact: Path, kind: str, tokens: int) -> dict[str, Any]:
    text = HELD_OUT / f"{kind}.txt"
    evaluation = answer_of(edgekit("eval", artifact, "--text", text, "--tokens", str(tokens), "--json"))
    kept = ("tokens", "kl_mean", "kl_error", "same_top", "perplexity", "reference_perplexity")
    bits = {"bits_per_weight": evaluation["bits_per_weight"]} if kind == KINDS[0] else {}
    return {name: evaluation["divergence"][name] for name in kept} | bits


def run(artifact: Path, target: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "examples.benchmarks.real_models", "--child", str(artifact), target]
    return answer_of(subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT))


def answered(artifact: Path, task: str, limit: str | None = None) -> dict[str, Any]:
    options = ["--limit", limit] if limit else []
    options += ["--allow-code"] if task == "humaneval" else []
    report = answer_of(edgekit("eval", artifact, "--tasks", task, *options, "--json"))
    share: dict[str, Any] = report["results"][0]["share"]
    return share


def child(artifact: Path, target: str) -> dict[str, Any]:
    """Fill the context and answer, in a process of its own; return the most private memory and the speed."""
    import edgekit

    water = HighWater()
    water.start()
    with edgekit.open(artifact, context=FILLED[target], prefixes=0) as runtime:
        words = (HELD_OUT / "prose.txt").read_text()
        prompt = runtime.codec.encode(words, add_special_tokens=True)[: FILLED[target] - ANSWER_TOKENS]
        options: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        answers = [runtime.complete(prompt, **options) for _ in range(TRIALS[target])]
        predicted = runtime.memory().predicted
    water.is_over.set()
    water.join()
    return {
        "context": FILLED[target],
        "predicted_private_bytes": predicted.private_bytes,
        "measured_private_bytes": water.most,
        "prefill_tokens_per_s": max(answer.timings.prefill_tokens_per_s or 0 for answer in answers),
        "decode_tokens_per_s": max(answer.timings.decode_tokens_per_s or 0 for answer in answers),
        "load_average": os.getloadavg()[0],
    }


def tables(rows: list[Row]) -> str:
    lines = []
    for model in MODELS:
        own = sorted((row for row in rows if row["model"] == model), key=place)
        made = [row for row in own if not row["refused"]]
        lines += [f"### {model}", ""]
        if made:
            lines += [*quality_table(made), "", *run_table(made), ""]
        lines += [f"- {model} as {name(row)} is refused: {row['refused']}" for row in own if row["refused"]]
        lines += [f"- not run: {', '.join(missing(own))}." if missing(own) else "- every recipe was run.", ""]
    return "\n".join(lines)


def place(row: Row) -> tuple[int, int, str]:
    return list(TOKENS).index(row["target"]), [DEFAULT, *RECIPES, *NATIVE_RECIPES].index(row["recipe"]), row["effort"]


def name(row: Row) -> str:
    return f"{row['target']} {row['recipe']}" + ("" if row["effort"] == DEFAULT else f", effort {row['effort']}")


def missing(rows: list[Row]) -> list[str]:
    made = {(row["target"], row["recipe"]) for row in rows}
    return [f"{target} {recipe}" for target in TOKENS for recipe in (DEFAULT, *RECIPES) if (target, recipe) not in made]


def quality_table(rows: list[Row]) -> list[str]:
    lines = [
        "| target, recipe | method | bits | MB | KL, code | KL, prose | same top, code | prose "
        "| perplexity, code (float) | prose (float) | self-check |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        texts = [row["quality"][kind] for kind in KINDS]
        recipe = row["stored_as"] if row["recipe"] == DEFAULT else ""
        cells = [
            name(row) + (f" ({recipe})" if recipe else ""),
            row["method"],
            f"{row['bits_per_weight']:.2f}",
            f"{row['bytes'] / 1e6:.1f}",
            *(f"{text['kl_mean']:.4f} ± {text['kl_error']:.4f}" for text in texts),
            *(f"{text['same_top']:.1%}" for text in texts),
            *(f"{text['perplexity']:.2f} ({text['reference_perplexity']:.2f})" for text in texts),
            row["self_check"].partition(",")[0],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def run_table(rows: list[Row]) -> list[str]:
    lines = [
        "| target, recipe | context | private memory, predicted | measured | off by | prefill tok/s | decode tok/s "
        "| load | tasks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        run = row["run"]
        predicted, measured = run["predicted_private_bytes"], run["measured_private_bytes"]
        shares = (
            f"{task.partition('=')[0]} {share['right']} of {share['asked']} ({share['low']:.0%} to {share['high']:.0%})"
            for task, share in row["tasks"].items()
        )
        cells = [
            name(row),
            f"{run['context']:,}",
            f"{predicted / 2**20:.0f} MiB",
            f"{measured / 2**20:.0f} MiB",
            f"{predicted / measured - 1:+.1%}",
            *(
                (f"{run['prefill_tokens_per_s']:.0f}", f"{run['decode_tokens_per_s']:.1f}")
                if run["load_average"] <= MOST_LOAD
                else ("busy", "busy")
            ),
            f"{run['load_average']:.1f}",
            "; ".join(shares),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_page(rows: list[Row]) -> None:
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    write_output(PAGE, f"{before}{BEGIN}\n\n{tables(rows)}\n{END}{after}".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--targets", nargs="+", choices=TOKENS, default=list(TOKENS))
    parser.add_argument("--recipes", nargs="+", choices=[DEFAULT, *RECIPES, *NATIVE_RECIPES])
    parser.add_argument("--effort", choices=["quick", "normal"], default="quick", help="of rows that are not default")
    parser.add_argument("--tasks", nargs="*", default=[], metavar="NAME[=LIMIT]", help="public tasks for the rows made")
    parser.add_argument("--again", action="store_true", help="measure rows anew that are there already")
    parser.add_argument("--page", action="store_true", help="only write the page from the data")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(Path(options.child[0]), options.child[1])))
        return
    rows: list[Row] = json.loads(options.data.read_text())["rows"] if options.data.exists() else []
    recipes = [] if options.page else options.recipes or [DEFAULT, *RECIPES]
    for model in options.models:
        for target in options.targets:
            for recipe in recipes:
                effort = (
                    DEFAULT if recipe == DEFAULT or RECIPES.get(recipe, RECIPES["s8"]).is_exact() else options.effort
                )
                asked = dict(zip(ASKED, (model, target, recipe, effort), strict=True))
                others = [row for row in rows if any(row[key] != asked[key] for key in ASKED)]
                if len(others) < len(rows) and not options.again:
                    continue
                print(" ".join(asked.values()), flush=True)
                rows = [*others, measure(asked, options.tasks)]
                print(json.dumps(rows[-1]), flush=True)
                write_output(options.data, (json.dumps({"rows": rows}, indent=1) + "\n").encode())
    write_page(rows)


if __name__ == "__main__":
    main()
