"""Compare predicted memory with measured memory: random models under a hard cap, each in a process of its own.

    python -m examples.benchmarks.memory_contract [--count 200] [--shapes 20] [--first 0] [--keep DIR] [--json FILE]
    python -m examples.benchmarks.memory_contract --config config.json [--recipe s4-g32] [--count 20] [--json FILE]
    python -m examples.benchmarks.memory_contract --artifact DIR ... [--rows FILE.jsonl --most N] [--json FILE]

Models of 0.01 to 1.2 billion random weights are exported for onnx, for one thread or two; each is opened in random ways
(context or window, sequences, bits, kept prefixes, n-gram drafts, an adapter, schemas) and brought to its worst moment:
the last prompt is read while all other states are full and answer. The most private memory that was seen is compared
with the prediction.
`--first` takes other shapes than the formulas were fitted on, and `--config` a published model's.
Adapters and compiled schemas come after opening: the prediction is that of opening and what the budget
counts for those that are there. `--rows` keeps each setting that was measured, and a later call goes on after them
(`--most 0` only prints the tables). Predictions are this version's, also next to rows of an earlier one.
Memory is read from outside the child, which would not see what a library takes while it holds the interpreter. Opening
and what comes after it have a peak each. What comes after opening may not take more than 1.05 of the prediction for it.
RLIMIT_DATA counts addresses, mapped weights among them; so it is set once the model is open, to what is there, the
private bytes that the prediction leaves and 32 MiB of addresses that nothing is written to. What was resident is held
against 1.05 as well (`above_cap`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
from datetime import date
from pathlib import Path
from typing import Any

from edgekit_onnx import OnnxTarget
from edgekit_onnx.int8_kv import STEPS_FILE

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.common.footprint import mapped_data_bytes
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.memory import LONE_VERIFIED_ROWS
from edgekit.contracts.plan import Estimate, Plan
from edgekit.device.load import load_profile
from edgekit.plugins import load_target
from edgekit.runtime.memory.admission import RunConfig, estimate_of
from edgekit.runtime.speculation.open import drafting_bytes, drafts
from edgekit.testing import write_adapter
from examples.benchmarks.process_memory import HighWater, status_bytes
from examples.benchmarks.random_artifacts import built

assert sys.platform != "win32"

CAP = 1.05
STACK_BYTES = 1 << 20
ASKED = ("context", "window", "keep", "sequences", "prefixes", "draft", "kv_bits", "adapter_rank", "schemas")
COUNTED = ("adapters",)  # they come after opening: the budget counts them as they come
UNTOUCHED_BYTES = 32 << 20  # stacks and the ends of heaps; up to 24 MiB were seen


def random_opening(chance: random.Random, plan: Plan, *, has_steps: bool = False) -> dict[str, Any]:
    """Draw a setting, bounded so that filling takes seconds; `has_steps`: the cache may have 8 bits."""
    per_token = sum(2 * 4 * layer.kv_heads * layer.head_dim for layer in plan.model.layers if layer.stores_kv)
    sequences = chance.choice((1, 1, 2, 4))
    most = min(plan.context, int(6e8 / per_token / sequences), max(512, int(4e11 / plan.model.parameters / sequences)))
    tokens = max(128, int(math.exp(chance.uniform(math.log(128), math.log(max(129, most))))))
    drafts = chance.random() < 0.25
    # Nobody knows in how few steps an answer with drafts fills a context; a full window stays full.
    kind = "window" if drafts and sequences > 1 else chance.choice(("context", "window"))
    asked: dict[str, Any] = {kind: tokens, "sequences": sequences}
    if kind == "context" and chance.random() < 0.3:
        asked["prefixes"] = per_token * tokens  # as much as one of the states, which the first answer leaves there
    if drafts:
        asked["draft"] = "ngram"
    if chance.random() < 0.35:
        asked["kv_bits"] = chance.choice((16, 8) if has_steps else (16,))
    if plan.adapter_rank and chance.random() < 0.3:
        asked["adapter_rank"] = chance.randint(1, plan.adapter_rank)
    if chance.random() < 0.2:
        asked["schemas"] = chance.choice((1, 4, 16))
    return asked


def predicted(plan: Plan, asked: dict[str, Any]) -> tuple[Estimate, Estimate]:
    """The estimates of opening, and of the time after it."""
    tokens = asked.get("context") or asked["window"]
    policy = KVEvictionPolicy.of(asked.get("window"), keep=asked.get("keep"))
    bits = asked.get("kv_bits", plan.storage.kv_bits)
    storage = plan.storage.model_copy(update={"capacity_tokens": tokens, "kv_bits": bits})
    sequences = asked["sequences"]
    opening = RunConfig(
        kv_config=storage,
        policy=policy,
        sequences=sequences,
        prefix_bytes=asked.get("prefixes", 0),
        draft_bytes=drafting_bytes(asked.get("draft"), tokens, sequences, plan),
        drafts=drafts(asked.get("draft")),
    )
    memory = load_target(plan.target).memory
    return estimate_of(plan, opening, memory), estimate_of(plan, opening, memory, is_open=True)


def fill(runtime: Any, asked: dict[str, Any], chunk: int, turn: int, last_answer: int) -> dict[str, int | None]:
    """Every state is full while the last prompt is read: those before it answer meanwhile, and end after it.

    Returns the memory by class at that moment. States of hybrid models have kept all checkpoints that they may.
    """
    tokens, sequences = asked.get("context") or asked["window"], asked["sequences"]
    read = max(tokens + 40, (runtime.engine.checkpoint_tokens or 0) + 8)  # of a window
    steps, lengths, answers = last_answer, list[int](), list[int]()
    for _ in range(sequences):  # the last first: how long it is read says how long the others answer
        lengths.insert(0, read if "window" in asked else tokens - 2 - steps)
        answers.insert(0, steps)
        steps += -(-lengths[0] // chunk) + 4
    if "draft" in asked:
        answers[:-1] = [step * LONE_VERIFIED_ROWS for step in answers[:-1]]  # so many tokens may one step give
    vocabulary, streams = runtime.engine.capabilities.vocabulary, list[Any]()
    for which in range(sequences):
        asking = prompt(lengths[which], vocabulary, which + 10 * turn)
        adapter = "one" if "adapter_rank" in asked else None
        streams.append(runtime.submit(asking, max_tokens=answers[which], ignore_eos=True, adapter=adapter))
        while not streams[-1].generated_tokens and not streams[-1].is_done:
            runtime.step()
        rewind_and_repeat(runtime.engine)
    classes = {each.name: each.measured_bytes for each in runtime.memory().classes}
    streams[-1].answer()
    for stream in streams:
        stream.cancel()
    return classes


def rewind_and_repeat(engine: Any) -> None:
    """Have the newest state of a hybrid model compute its last tokens again, as scoring does: it keeps a copy there."""
    if engine.checkpoint_tokens and not engine.states[-1].held.evicted:
        state, count = engine.states[-1], min(32, engine.states[-1].length)
        tokens = state.recurrent.tokens(state.position - count, state.position).tolist()
        state.rewind(count)
        feed(engine, state, tokens, 0)


def prompt(length: int, vocabulary: int, number: int) -> list[int]:
    """Tokens from all over the vocabulary, unlike another prompt's; what looks up the last ones finds them before."""
    tokens = [(number * 1009 + place * 7919) % vocabulary for place in range(length)]
    return tokens[:-64] + tokens[-128:-64] if length >= 128 else tokens


def prepare(runtime: Any, plan: Plan, asked: dict[str, Any], folder: Path) -> None:
    """Load the adapter and compile the schemas that are asked for."""
    if "adapter_rank" in asked:
        runtime.load_adapter("one", write_adapter(folder / "adapter", plan.model, rank=asked["adapter_rank"]))
    for number in range(asked.get("schemas", 0)):
        names = [f"name {number} {place}" for place in range(100)]
        runtime.generate("The name is", schema={"enum": names}, max_tokens=2)


def child(artifact: Path, asked: dict[str, Any], open_bytes: int, cap_share: float) -> None:
    """Open, say so, and wait for a line; then fill every state through the runtime, decode a little and print a row."""
    threading.stack_size(STACK_BYTES)
    mapped_before = mapped_data_bytes() or 0
    options = {name: value for name, value in asked.items() if name not in ("adapter_rank", "schemas")}
    plan = open_artifact(artifact).plan
    with tempfile.TemporaryDirectory() as folder, edgekit.open(artifact, **{"prefixes": 0} | options) as runtime:
        print("open", flush=True)
        sys.stdin.readline()
        prepare(runtime, plan, asked, Path(folder))
        memory = runtime.memory()
        formats = memory.formats_bytes
        beside = formats + next(each.measured_bytes or 0 for each in memory.classes if each.name == "adapters")
        # Addresses that nothing is written to are no memory, but this cap counts them: so many are allowed beside.
        more = round(cap_share * (open_bytes + beside)) - status_bytes("RssAnon") + UNTOUCHED_BYTES
        cap = status_bytes("VmData") + more
        resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
        # The second runs beside what the first left. An answer that drafts is longer; so its prompt is shorter, without
        # a window.
        # The answer is long enough to show what grows with each token, also where that is little.
        tokens = asked.get("context") or asked["window"]
        answers = [max(6, min(48, tokens // 8))] * (2 if "prefixes" in asked else 1)
        if "draft" in asked:
            answers = [100] if "window" in asked else [*answers, 100]
        for turn, last_answer in enumerate(answers):
            classes = fill(runtime, asked, plan.chunk_tokens, turn, last_answer)
        metrics, mapped = runtime.metrics(), (mapped_data_bytes() or 0) - mapped_before
        found = {
            "mapped": mapped,
            "beside": beside,
            "formats": formats,
            "classes": classes | {"cache": metrics.peak_kv_bytes},
            "proposed": metrics.proposed,
            "accepted": metrics.accepted,
        }
        print(json.dumps(found), flush=True)


def measured(artifact: Path, asked: dict[str, Any], cap_share: float) -> dict[str, Any]:
    """Run one child, and watch its private memory from this process; return its row, or how it died."""
    plan = open_artifact(artifact).plan
    estimate, later = (each.model_copy(update={"adapter_bytes": 0}) for each in predicted(plan, asked))
    command = [sys.executable, "-m", "examples.benchmarks.memory_contract", "--child", str(artifact), json.dumps(asked)]
    command += [str(later.private_bytes), str(cap_share)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        water = HighWater(process.pid)
        water.start()
        process.stdout.readline()
        opened = water.next_phase()
        said, errors = process.communicate("go on\n")
        water.is_over.set()
        water.join()
    layer = plan.model.layers[0]
    row: dict[str, Any] = {
        **asked, "parameters": plan.model.parameters, "chunk": plan.chunk_tokens, "threads": plan.threads,
        "hidden": plan.model.hidden_size,
        "inner": plan.model.intermediate_size, "layers": len(plan.model.layers), "vocabulary": plan.model.vocab_size,
        "heads": plan.model.heads, "kv_heads": layer.kv_heads, "head_dim": layer.head_dim,
        "predicted": estimate.private_bytes, "predicted_mapped": estimate.mapped_weights_bytes,
        "artifact": artifact.name, "opened": opened,
    }  # fmt: skip
    if process.returncode:
        return row | {"killed": True, "said": (errors.strip().splitlines() or [""])[-1][:300]}
    return compared(row | json.loads(said) | {"killed": False, "running": water.most}, plan, asked)


def compared(row: dict[str, Any], plan: Plan, asked: dict[str, Any]) -> dict[str, Any]:
    """A measured row next to its prediction: the whole, what comes after opening, and each class."""
    estimate, later = (each.model_copy(update={"adapter_bytes": 0}) for each in predicted(plan, asked))
    running = later.private_bytes + row["beside"]
    most, peak = max(estimate.private_bytes, running), max(row["opened"], row["running"])
    return row | {
        "predicted": most, "peak": peak, "error": most / peak - 1, "predicted_running": running,
        "running_error": running / row["running"] - 1, "predicted_mapped": estimate.mapped_weights_bytes,
        "by_class": by_class(later, row["classes"], row["running"], row.get("formats")),
    }  # fmt: skip


def predicted_again(row: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the row with the prediction of this version, where an earlier one made the artifact."""
    if row["killed"]:
        return row
    device = load_profile("this")
    facts = OnnxTarget().offer(plan.model, device, "cpu", plan.recipe).memory
    measured_here = ("tokenizer_bytes", "tokenizer_reading_bytes", "source")
    facts = facts.model_copy(update={name: getattr(plan.memory, name) for name in measured_here})
    asked = {name: row[name] for name in ASKED if name in row}
    return compared(row, plan.model_copy(update={"memory": facts}), asked)


def by_class(
    later: Estimate, classes: dict[str, int | None], running: int, formats: int | None
) -> dict[str, tuple[int, int]]:
    """Predicted and measured bytes of each class while the last prompt is read."""
    sizes = dict(later.classes)
    sizes["runtime"] += sizes.pop("private weights")
    held = {"runtime": classes["runtime and private weights"]} | {
        name: classes[name] for name in ("cache", "draft", "prefixes", "adapters", "compiled formats")
    }
    pairs = {name: (sizes.get(name, 0), size or 0) for name, size in held.items()}
    for name in COUNTED:
        pairs[name] = (pairs[name][1], pairs[name][1])
    size = pairs["compiled formats"][1]
    pairs["compiled formats"] = size if formats is None else formats, size  # older rows have one figure for both
    # What the step itself takes is gone when it has ended.
    pairs["activations"] = sizes["activations"], running - sum(size for _, size in pairs.values())
    return {name: pair for name, pair in pairs.items() if any(pair)}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The settings that an earlier call measured."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The settings of each artifact as lines of Markdown: private memory in MiB, and how far predictions were off."""
    lines = [
        "| model | settings | killed | predicted | measured | median error | highest | lowest |"
        " opening above its prediction | running above its own |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted({row["artifact"] for row in rows}):
        mine = [row for row in rows if row["artifact"] == name]
        found, whole = summary(mine), [row for row in mine if not row["killed"]]
        ranges = (f"{_mib(min(row[each] for row in whole))} to {_mib(max(row[each] for row in whole))}"
                  for each in ("predicted", "peak"))  # fmt: skip
        off = (found["worst_over"], found["worst_under"], found["opening_above"], found["running_above"])
        cells = [name, str(len(mine)), str(found["killed"]), *ranges, f"{found['median_error']:.1%}"]
        lines.append(f"| {' | '.join([*cells, *(f'{each:+.1%}' for each in off)])} |")
    return lines


def class_table(rows: list[dict[str, Any]]) -> list[str]:
    """Each class while the last prompt is read: medians of predicted and measured MiB, and of their errors.

    What the budget counts as it comes is no prediction.
    """
    names, pairs = sorted({row["artifact"] for row in rows}), dict[str, dict[str, list[tuple[int, int]]]]()
    for row in (row for row in rows if not row["killed"]):
        mapped = {"mapped weights": (row["predicted_mapped"], row["mapped"])}
        for what, pair in (row["by_class"] | mapped).items():
            pairs.setdefault(what, {}).setdefault(row["artifact"], []).append(pair)
    lines = [f"| class | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    for what, found in pairs.items():
        cells = [_class_cell(what, found.get(name, [])) for name in names]
        lines.append(f"| {' | '.join([what, *cells])} |")
    return lines


def _class_cell(what: str, pairs: list[tuple[int, int]]) -> str:
    if not pairs:
        return ""
    predicted, measured = (statistics.median(each) for each in zip(*pairs, strict=True))
    if what in COUNTED:
        return f"{_mib(measured)} counted"
    errors = [one / other - 1 for one, other in pairs if min(one, other) > 1 << 20]
    error = f" ({statistics.median(errors):+.1%})" if errors else ""
    return f"{_mib(predicted)}, {_mib(measured)}{error}"


def _mib(size: float) -> str:
    return f"{size / (1 << 20):.{0 if size >= 10 << 20 else 1}f}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    whole = [row for row in rows if not row["killed"]]
    errors = [row["error"] for row in whole]
    mapped = [row["predicted_mapped"] / row["mapped"] - 1 for row in whole]
    return {
        "configurations": len(rows),
        "models": len({(row["hidden"], row["inner"], row["layers"], row["vocabulary"]) for row in rows}),
        "killed": sum(row["killed"] for row in rows),
        "above_cap": sum(not row["killed"] and row["peak"] > CAP * row["predicted"] for row in rows),
        "median_error": statistics.median(map(abs, errors)),
        "worst_over": max(errors),
        "worst_under": min(errors),
        "opening_above": max(row["opened"] / row["predicted"] - 1 for row in whole),
        "running_above": max(row["running"] / row["predicted_running"] - 1 for row in whole),
        "mapped_median_error": statistics.median(map(abs, mapped)),
        "mapped_worst_over": max(mapped),
        "mapped_worst_under": min(mapped),
        "largest_private_mb": max(row["predicted"] for row in rows) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first shape")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cap", type=float, default=CAP, help="the hard cap, as a share of the prediction")
    parser.add_argument("--config", type=Path, help="random weights of this config instead of random shapes")
    parser.add_argument("--recipe", default="s4-g32", help="of --config")
    parser.add_argument("--artifact", type=Path, action="append", help="measure this one instead of random shapes")
    parser.add_argument("--rows", type=Path, help="a file with a row for each setting, which a later call continues")
    parser.add_argument("--most", type=int, default=1 << 30, help="measure at most this many settings now")
    parser.add_argument("--keep", type=Path, help="a folder for the artifacts; otherwise a temporary one")
    parser.add_argument("--name", default="random models", help="what --json calls these settings")
    parser.add_argument("--json", type=Path, help="a file to which the summary is added")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        path, asked, open_bytes, cap_share = arguments.child
        child(Path(path), json.loads(asked), int(open_bytes), float(cap_share))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("EDGEKIT_HOME", str(folder / "home"))
        shapes = range(arguments.first, arguments.first + (1 if arguments.config else arguments.shapes))
        of = (json.loads(arguments.config.read_text()), arguments.recipe) if arguments.config else None
        artifacts = arguments.artifact or (built(folder, shape, of) for shape in shapes)
        share = -(-arguments.count // len(arguments.artifact or shapes))
        kept = rows_of(arguments.rows) if arguments.rows else []
        rows, new = list(kept), 0
        for artifact in artifacts:
            plan = open_artifact(artifact).plan
            rows = [predicted_again(row, plan) if row["artifact"] == artifact.name else row for row in rows]
            if arguments.most:
                edgekit.open(artifact, context=256, prefixes=0).close()  # packs the weights, once
            has_steps = (artifact / STEPS_FILE).exists()
            done = sum(row["artifact"] == artifact.name for row in kept)
            for number in range(done, share):
                if len(rows) >= arguments.count or new >= arguments.most:
                    break
                chance = random.Random(f"{arguments.seed} {artifact.name} {number}")
                row = measured(artifact, random_opening(chance, plan, has_steps=has_steps), arguments.cap)
                rows.append(row)
                new += 1
                print(json.dumps(row), flush=True)
                if arguments.rows:
                    with arguments.rows.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    found = summary(rows)
    print(json.dumps(found, indent=1))
    print("\n".join([*table(rows), "", *class_table(rows)]))
    if arguments.json:
        known = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        shown = {what: round(value, 4) if isinstance(value, float) else value for what, value in found.items()}
        known[arguments.name] = {"measured": date.today().isoformat(), **shown, "cap": arguments.cap}
        arguments.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
