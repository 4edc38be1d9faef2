"""Exports real models with every built-in recipe on every target, and measures what each artifact loses and takes.

    python -m examples.benchmarks.real_models --models smollm2 --targets onnx --recipes default s8
    python -m examples.benchmarks.real_models --models smollm2 --targets onnx --tasks hellaswag=100 humaneval=32
    python -m examples.benchmarks.real_models --keep build/real --again run
    python -m examples.benchmarks.real_models --page

Each part of a row is added to docs/data/real_models.jsonl as soon as it is measured, and what is there is not measured
again unless `--again` names it: an interrupted run goes on where it stood. The row `default` is
`edgekit export MODEL --device NAME` with a device for which a plan chooses the target, and nothing else. KL, equal top
tokens and perplexity come from held-out text (examples/benchmarks/held_out) that nothing is calibrated on.
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
from edgekit.contracts.recipe import GGUF_RECIPES, NATIVE_RECIPES, RECIPES
from edgekit.measure.bench.machine import Machine
from edgekit.testing.real_models import gemma3, smollm2
from examples.benchmarks.process_memory import HighWater

Row = dict[str, Any]

ROOT = Path(__file__).parents[2]
HELD_OUT = Path(__file__).parent / "held_out"
DATA, PAGE = ROOT / "docs" / "data" / "real_models.jsonl", ROOT / "docs" / "evidence" / "real_models.md"
BEGIN, END = "<!-- tables: written by examples/benchmarks/real_models.py -->", "<!-- end of tables -->"

MODELS: dict[str, Callable[[], str | Path]] = {"smollm2": smollm2, "gemma3": gemma3, "demo": lambda: "demo"}
# Targets, and a device for which a plan chooses each. llamacpp is chosen only where it is measured to be the fastest,
# so it is asked for.
TARGETS = {"onnx": "laptop-x86-8gb", "llamacpp": "this", "executorch": "pixel-9", "mlx": "macbook-m4-16gb"}
DEFAULT = "default"
NAMES = [DEFAULT, *RECIPES, *GGUF_RECIPES, *NATIVE_RECIPES]
KINDS = ("code", "prose")
PARTS = ("quality", "run")
CONTEXT = 1024
TOKENS = 1024  # of held-out text of each kind, and of the context that is filled, unless the command says otherwise
ANSWER_TOKENS = 32
MOST_OTHERS = 0.1  # of all cores, used by other programs; beside more of them a speed says nothing, and is not shown
TRIALS = 3
ASKED = ("model", "target", "recipe", "effort")  # what tells rows apart


def exported(row: Row, artifact: Path) -> Row:
    """Export one artifact unless it is there; a refusal is a result too."""
    if why := plugins.load_target(row["target"]).missing():
        raise SystemExit(f"{row['target']}: {why}")
    is_default = row["recipe"] == DEFAULT
    device = TARGETS[row["target"]] if is_default else "this"
    options = ["--device", device]
    if device == "this":
        options += ["--target", row["target"]]
    if not is_default:
        options += ["--recipe", row["recipe"], "--context", str(CONTEXT)]
    if row["effort"] != DEFAULT:
        options += ["--effort", row["effort"]]
    if not artifact.exists():
        done = edgekit("export", MODELS[row["model"]](), *options, "-o", artifact)
        if done.returncode:
            return row | {"refused": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    manifest = json.loads((artifact / "manifest.json").read_text())
    return row | {
        "refused": None,
        "device": device,
        "self_check": manifest["self_check"],
        "stored_as": manifest["plan"]["recipe"]["name"],
        "method": manifest["plan"]["quantisation"]["method"],
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
    }


def measured(row: Row, artifact: Path, part: str, tokens: int) -> Row:
    """Add a part: `quality`, `run` or a task with its limit."""
    if part == "run":
        return row | {"run": run(artifact, tokens)}
    if part == "quality":
        found = {kind: quality(artifact, kind, tokens) for kind in KINDS}
        bits = [each.pop("bits_per_weight") for each in found.values()]
        return row | {"bits_per_weight": bits[0], "quality": found}
    task, _, limit = part.partition("=")
    return row | {"tasks": row.get("tasks", {}) | {task: answered(artifact, task, limit)}}


def is_there(row: Row, part: str) -> bool:
    task, _, limit = part.partition("=")
    share = row.get("tasks", {}).get(task)
    return part in row if part in PARTS else bool(share) and share["asked"] >= int(limit or 0)


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
    bits = {"bits_per_weight": evaluation["bits_per_weight"]}
    return {name: evaluation["divergence"][name] for name in kept} | bits


def run(artifact: Path, filled: int) -> dict[str, Any]:
    """Fill the context and answer, in a process of its own whose memory is watched from this one."""
    command = [sys.executable, "-m", "examples.benchmarks.real_models", "--child", str(artifact), str(filled)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    water = HighWater(process.pid)
    water.start()
    answer, errors = process.communicate()
    water.is_over.set()
    water.join()
    found = answer_of(subprocess.CompletedProcess(command, process.returncode, answer, errors))
    return {**found, "measured_private_bytes": water.most}


def answered(artifact: Path, task: str, limit: str) -> dict[str, Any]:
    options = ["--limit", limit] if limit else []
    options += ["--allow-code"] if task == "humaneval" else []
    report = answer_of(edgekit("eval", artifact, "--tasks", task, *options, "--json"))
    share: dict[str, Any] = report["results"][0]["share"]
    return share


def child(artifact: Path, filled: int) -> dict[str, Any]:
    """Fill the context and answer; return the predicted memory and the speed."""
    import edgekit

    with edgekit.open(artifact, context=filled, prefixes=0) as runtime:
        words = (HELD_OUT / "prose.txt").read_text()
        prompt = runtime.codec.encode(words, add_special_tokens=True)[: filled - ANSWER_TOKENS]
        options: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        machine = Machine()
        before = machine.usage([os.getpid()])
        answers = [runtime.complete(prompt, **options) for _ in range(TRIALS)]
        others = machine.between(before, machine.usage([os.getpid()])).others_share
        predicted = runtime.memory().predicted
    return {
        "context": filled,
        "predicted_private_bytes": predicted.private_bytes,
        "prefill_tokens_per_s": max(answer.timings.prefill_tokens_per_s or 0 for answer in answers),
        "decode_tokens_per_s": max(answer.timings.decode_tokens_per_s or 0 for answer in answers),
        "others_share": others,
    }


def tables(rows: list[Row]) -> str:
    lines = []
    for model in MODELS:
        own = sorted((row for row in rows if row["model"] == model), key=place)
        lines += [f"### {model}", ""]
        for made in (quality_table(own), run_table(own), task_table(own)):
            lines += [*made, ""] if made else []
        lines += [f"- {name(row)} is refused: {row['refused']}" for row in own if row["refused"]]
        lines += [f"- not run: {'; '.join(missing(own))}.", ""] if missing(own) else ["- every recipe was run.", ""]
    return "\n".join(lines)


def place(row: Row) -> tuple[int, int, str]:
    return list(TARGETS).index(row["target"]), NAMES.index(row["recipe"]), row["effort"]


def name(row: Row) -> str:
    chosen = row["recipe"] == DEFAULT and not row["refused"]
    return f"{row['target']} {row['recipe']}" + (f" for {row['device']}: {row['stored_as']}" if chosen else "")


def missing(rows: list[Row]) -> list[str]:
    """Recipes that were not run, by target."""
    made = {(row["target"], row["recipe"]) for row in rows}
    left = {target: [each for each in (DEFAULT, *RECIPES) if (target, each) not in made] for target in TARGETS}
    return [f"{target} {', '.join(recipes)}" for target, recipes in left.items() if recipes]


def table(titles: str, lines: list[list[str]]) -> list[str]:
    """A Markdown table; nothing without lines."""
    cells = [title.strip() for title in titles.split("|")]
    every = [cells, ["---"] * len(cells), *lines] if lines else []
    return [f"| {' | '.join(line)} |" for line in every]


def quality_table(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        if "quality" not in row:
            continue
        texts = [row["quality"][kind] for kind in KINDS]
        lines.append([
            name(row),
            row["method"],
            f"{row['bits_per_weight']:.2f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{texts[0]['tokens']:,}",
            *(f"{text['kl_mean']:.4f} ± {text['kl_error']:.4f}" for text in texts),
            *(f"{text['same_top']:.1%}" for text in texts),
            *(f"{text['perplexity']:.2f} ({text['reference_perplexity']:.2f})" for text in texts),
            row["self_check"].partition(",")[0],
        ])  # fmt: skip
    titles = (
        "target, recipe | method | bits | MB | tokens | KL, code | KL, prose | same top, code | prose "
        "| perplexity, code (float) | prose (float) | self-check"
    )
    return table(titles, lines)


def run_table(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        if "run" not in row:
            continue
        run = row["run"]
        predicted, measured = run["predicted_private_bytes"], run["measured_private_bytes"]
        others = run.get("others_share")
        is_quiet = others is not None and others <= MOST_OTHERS
        lines.append([
            name(row),
            f"{run['context']:,}",
            f"{predicted / 2**20:.0f} MiB",
            f"{measured / 2**20:.0f} MiB",
            f"{predicted / measured - 1:+.1%}",
            f"{run['prefill_tokens_per_s']:.0f}" if is_quiet else "busy",
            f"{run['decode_tokens_per_s']:.1f}" if is_quiet else "busy",
        ])  # fmt: skip
    titles = "target, recipe | context | private memory, predicted | measured | off by | prefill tok/s | decode tok/s"
    return table(titles, lines)


def task_table(rows: list[Row]) -> list[str]:
    lines = [
        [name(row), task, f"{share['right']} of {share['asked']}", f"{share['low']:.0%} to {share['high']:.0%}"]
        for row in rows
        for task, share in row.get("tasks", {}).items()
    ]
    return table("target, recipe | task | right | 95 % interval", lines)


def write_page(rows: list[Row]) -> None:
    text = PAGE.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    write_output(PAGE, f"{before}{BEGIN}\n\n{tables(rows)}\n{END}{after}".encode())


def read_rows(data: Path) -> dict[tuple[str, ...], Row]:
    """Rows by what was asked; a later line of the same row takes the place of an earlier one."""
    lines = data.read_text().splitlines() if data.exists() else []
    return {tuple(row[key] for key in ASKED): row for row in map(json.loads, lines)}


def effort_of(recipe: str, effort: str) -> str:
    """Only recipes of edgekit's own integers have an effort, and `default` says nothing of it."""
    return effort if recipe in RECIPES and not RECIPES[recipe].is_exact() else DEFAULT


def complete(asked: Row, parts: Iterable[str], again: Iterable[str], options: argparse.Namespace) -> None:
    """Measure the parts that a row lacks, each stored at once."""
    kept = read_rows(options.data).get(tuple(asked.values()), asked)
    wanted = [part for part in parts if part in again or not is_there(kept, part)]
    if kept.get("refused") or not wanted:
        return
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(options.keep or folder) / "-".join(asked.values())
        row = exported(kept, artifact)
        for part in [] if row["refused"] else wanted:
            print(*asked.values(), part, flush=True)
            row = measured(row, artifact, part, options.tokens)
            store(row, options.data)
        if row["refused"]:
            store(row, options.data)


def store(row: Row, data: Path) -> None:
    print(json.dumps(row), flush=True)
    with data.open("a") as file:  # one line at a time, so that two runs may add rows
        file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--recipes", nargs="+", choices=NAMES, default=[DEFAULT, *RECIPES])
    parser.add_argument("--effort", choices=["quick", "normal"], default="quick", help="of rows that are not default")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of text of each kind, and of the filled context")
    parser.add_argument("--tasks", nargs="*", default=[], metavar="NAME[=LIMIT]", help="public tasks of these rows")
    parser.add_argument("--again", nargs="*", default=[], metavar="PART", help=f"measured anew: {', '.join(PARTS)}")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the artifacts")
    parser.add_argument("--page", action="store_true", help="only write the page from the data")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(Path(options.child[0]), int(options.child[1]))))
        return
    for model in [] if options.page else options.models:
        for target in options.targets:
            for recipe in options.recipes:
                asked = dict(zip(ASKED, (model, target, recipe, effort_of(recipe, options.effort)), strict=True))
                complete(asked, [*PARTS, *options.tasks], options.again, options)
    if options.data == DATA:
        rows = read_rows(DATA)
        write_output(DATA, "".join(json.dumps(row) + "\n" for row in rows.values()).encode())
        write_page([*rows.values()])


if __name__ == "__main__":
    main()
