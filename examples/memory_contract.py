"""Is the predicted memory what a process takes? Random models under a hard cap, each in a process of its own.

    python examples/memory_contract.py [--count 200] [--shapes 20] [--first 0] [--keep DIR] [--json FILE]

Models of 0.01 to 1.2 billion random weights are exported for onnx, for one thread or two; each is opened in random ways
(context or window, sequences, kept prefixes, n-gram drafts) and brought to its worst moment: the last prompt is read
while all other states are full and answer. The most private memory that was seen is compared with the prediction.
`--first` takes other shapes than those that the formulas were fitted on.
The child may not take more than 1.05 of the prediction. RLIMIT_DATA counts addresses, mapped weights among them; so it
is set once the model is open, to what is there, the private bytes that the prediction leaves and 32 MiB of addresses
that nothing is written to. What was resident is held against 1.05 as well (`above_cap`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from edgekit_onnx import OnnxTarget
from edgekit_onnx.offers import offers
from random_models import random_weights

import edgekit
from edgekit.artifact import open_artifact, seal
from edgekit.cache import CachePolicy, Storage
from edgekit.memory import LONE_VERIFIED_ROWS
from edgekit.plan import Estimate, Plan, Quality, Speed
from edgekit.profiles import load_profile
from edgekit.recipe import named_recipe
from edgekit.runtime.admission import Opening, estimate_of
from edgekit.runtime.drafting.opening import drafting_bytes, drafts
from edgekit.runtime.footprint import mapped_data_bytes

CAP = 1.05
PLANNED_TOKENS = 8192
STACK_BYTES = 1 << 20
UNTOUCHED_BYTES = 32 << 20  # stacks and the ends of heaps; up to 24 MiB were seen
TOKENIZER = Path(__file__).parents[1] / "edgekit" / "_demo" / "target" / "tokenizer.json"


def random_shape(chance: random.Random) -> dict[str, Any]:
    """A decoder of 0.01 to 1.2 billion parameters, sizes spread evenly over the logarithm."""
    while True:
        head_dim = chance.choice((32, 64, 64, 128))
        kv_heads = chance.choice((1, 2, 4, 8))
        heads = kv_heads * chance.choice((1, 2, 4))
        hidden = heads * head_dim
        layers = chance.randint(4, 32)
        inner = round(hidden * chance.uniform(2, 4.5) / 128) * 128
        vocabulary = chance.choice((4096, 32_000, 49_152, 128_256))
        parameters = layers * hidden * (3 * inner + 2 * hidden) + vocabulary * hidden
        if 192 <= hidden <= 2560 and 1e7 <= parameters <= 1.2e9:
            return {
                "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
                "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
                "vocab_size": vocabulary, "max_position_embeddings": PLANNED_TOKENS, "tie_word_embeddings": True,
                "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10_000.0,
            }  # fmt: skip


def built(folder: Path, seed: int) -> Path:
    """A sealed artifact of a random shape; the one that is there already where an earlier run was cut short."""
    artifact = folder / f"artifact-{seed}"
    if artifact.exists():
        return artifact
    chance = random.Random(seed)
    config, recipe = random_shape(chance), chance.choice(("s4-g32", "s4-g64", "s4-g128"))
    chunk, threads = chance.choice((64, 128, 256, 512)), chance.choice((1, 2))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        weights = random_weights(Path(temporary) / "weights", config, named_recipe(recipe), "random")
        device = load_profile("this")
        facts = next(offer.memory for offer in offers(weights.model, device) if offer.recipe.name == recipe)
        nothing = Estimate(
            mapped_weights_bytes=0, private_weights_bytes=0, kv_bytes=0, activation_bytes=0, runtime_bytes=0
        )
        plan = Plan(
            model=weights.model, model_source="random", model_sha256="0" * 64, device="this", device_sha256="0" * 64,
            os_version="0", target="onnx", backend="cpu", recipe=weights.recipe, context=PLANNED_TOKENS, sequences=4,
            chunk_tokens=chunk, cache=CachePolicy(), storage=Storage(capacity_tokens=PLANNED_TOKENS, kv_bits=32),
            threads=threads, estimate=nothing, memory=facts, budget_bytes=1 << 40, budget_why="figures",
            speed=Speed(prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0, first_token_s=1.0, basis="none"),
            quality=Quality(kl=0.0, same_top=1.0, basis="prior", source="none"),
        )  # fmt: skip
        staging = Path(temporary) / "staging"
        staging.mkdir()
        OnnxTarget().export(plan, weights, staging, lambda done, total, what: None)
        shutil.copy(TOKENIZER, staging)
        seal(staging, artifact, plan, weights_sha256=weights.sha256, tools={}, self_check="none: figures")
    return artifact


def random_opening(chance: random.Random, plan: Plan) -> dict[str, Any]:
    """A context or a window, how many sequences, what is kept and drafted; bounded so that filling takes seconds."""
    per_token = sum(2 * 4 * layer.kv_heads * layer.head_dim for layer in plan.model.layers)
    sequences = chance.choice((1, 1, 2, 4))
    most = min(
        PLANNED_TOKENS, int(6e8 / per_token / sequences), max(512, int(1.2e12 / parameters_of(plan) / sequences))
    )
    tokens = max(256, int(math.exp(chance.uniform(math.log(256), math.log(max(257, most))))))
    drafts = chance.random() < 0.25
    # Nobody knows in how few steps an answer with drafts fills a context; a full window stays full.
    kind = "window" if drafts and sequences > 1 else chance.choice(("context", "window"))
    asked: dict[str, Any] = {kind: tokens, "sequences": sequences}
    if kind == "context" and chance.random() < 0.3:
        asked["prefixes"] = per_token * tokens  # as much as one of the states, which the first answer leaves there
    if drafts:
        asked["draft"] = "ngram"
    return asked


def parameters_of(plan: Plan) -> int:
    return sum(math.prod(tensor.shape) for tensor in plan.model.tensors())


def predicted(plan: Plan, asked: dict[str, Any]) -> Estimate:
    tokens = asked.get("context") or asked["window"]
    policy = CachePolicy.of(asked.get("window"))
    storage = plan.storage.model_copy(update={"capacity_tokens": tokens})
    sequences = asked["sequences"]
    opening = Opening(
        storage=storage,
        policy=policy,
        sequences=sequences,
        prefix_bytes=asked.get("prefixes", 0),
        draft_bytes=drafting_bytes(asked.get("draft"), tokens, sequences),
        drafts=drafts(asked.get("draft")),
    )
    return estimate_of(plan, opening)


def status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


class HighWater(threading.Thread):
    """The most private memory that was seen."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.is_over = 0, threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.002):
            self.most = max(self.most, status_bytes("RssAnon"))


def fill(runtime: Any, asked: dict[str, Any], chunk: int, turn: int, last_answer: int) -> None:
    """Every state is full while the last prompt is read: those before it answer meanwhile, and end after it."""
    tokens, sequences = asked.get("context") or asked["window"], asked["sequences"]
    steps, lengths, answers = last_answer, list[int](), list[int]()
    for _ in range(sequences):  # the last first: how long it is read says how long the others answer
        lengths.insert(0, tokens + 40 if "window" in asked else tokens - 2 - steps)
        answers.insert(0, steps)
        steps += -(-lengths[0] // chunk) + 4
    if "draft" in asked:
        answers[:-1] = [step * LONE_VERIFIED_ROWS for step in answers[:-1]]  # so many tokens may one step give
    vocabulary, streams = runtime.engine.abilities.vocabulary, list[Any]()
    for which in range(sequences):
        asking = prompt(lengths[which], vocabulary, which + 10 * turn)
        streams.append(runtime.submit(asking, max_tokens=answers[which], ignore_eos=True))
        while not streams[-1].generated_tokens:
            runtime.drive()
    streams[-1].answer()
    for stream in streams:
        stream.cancel()


def prompt(length: int, vocabulary: int, number: int) -> list[int]:
    """Tokens from all over the vocabulary, unlike another prompt's; what looks up the last ones finds them before."""
    tokens = [(number * 1009 + place * 7919) % vocabulary for place in range(length)]
    return tokens[:-64] + tokens[-128:-64]


def child(artifact: Path, asked: dict[str, Any], private_bytes: int, cap_share: float) -> dict[str, int]:
    """Open, fill every state through the runtime, decode a little; the most private memory, in all and by phase."""
    threading.stack_size(STACK_BYTES)
    water, mapped_before = HighWater(), mapped_data_bytes() or 0
    water.start()
    with edgekit.open(artifact, **{"prefixes": 0} | asked) as runtime:
        opened = max(water.most, status_bytes("RssAnon"))
        # Addresses that nothing is written to are no memory, but this cap counts them: so many are allowed beside.
        cap = status_bytes("VmData") + round(cap_share * private_bytes) - status_bytes("RssAnon") + UNTOUCHED_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
        # The second runs beside what the first left; an answer that drafts is longer, and so its prompt is shorter.
        answers = [6] * (2 if "prefixes" in asked else 1) + ([100] if "draft" in asked else [])
        for turn, last_answer in enumerate(answers):
            fill(runtime, asked, open_artifact(artifact).plan.chunk_tokens, turn, last_answer)
        metrics, mapped = runtime.metrics(), (mapped_data_bytes() or 0) - mapped_before
    water.is_over.set()
    water.join()
    return {
        "peak": max(water.most, opened),
        "opened": opened,
        "data": status_bytes("VmPeak"),
        "mapped": mapped,
        "held": metrics.most_held_bytes,
        "proposed": metrics.proposed,
        "accepted": metrics.accepted,
    }


def measured(artifact: Path, asked: dict[str, Any], cap_share: float) -> dict[str, Any]:
    """One child; what it says, or how it died."""
    plan = open_artifact(artifact).plan
    estimate = predicted(plan, asked)
    command = [sys.executable, __file__, "--child", str(artifact), json.dumps(asked)]
    command += [str(estimate.private_bytes), str(cap_share)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    layer = plan.model.layers[0]
    row: dict[str, Any] = {
        **asked, "parameters": parameters_of(plan), "chunk": plan.chunk_tokens, "threads": plan.threads,
        "hidden": plan.model.hidden_size,
        "inner": plan.model.intermediate_size, "layers": len(plan.model.layers), "vocabulary": plan.model.vocab_size,
        "heads": plan.model.heads, "kv_heads": layer.kv_heads, "head_dim": layer.head_dim,
        "kv_bytes": estimate.kv_bytes, "predicted": estimate.private_bytes,
        "predicted_mapped": estimate.mapped_weights_bytes,
    }  # fmt: skip
    if done.returncode:
        return row | {"killed": True, "said": (done.stderr.strip().splitlines() or [""])[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout)
    return row | found | {"killed": False, "error": estimate.private_bytes / found["peak"] - 1}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [row["error"] for row in rows if not row["killed"]]
    mapped = [row["predicted_mapped"] / row["mapped"] - 1 for row in rows if not row["killed"]]
    return {
        "configurations": len(rows),
        "models": len({(row["hidden"], row["inner"], row["layers"], row["vocabulary"]) for row in rows}),
        "killed": sum(row["killed"] for row in rows),
        "above_cap": sum(not row["killed"] and row["peak"] > CAP * row["predicted"] for row in rows),
        "median_error": statistics.median(map(abs, errors)),
        "worst_over": max(errors),
        "worst_under": min(errors),
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
    parser.add_argument("--keep", type=Path, help="a folder for the artifacts; otherwise a temporary one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        path, asked, private_bytes, cap_share = arguments.child
        print(json.dumps(child(Path(path), json.loads(asked), int(private_bytes), float(cap_share))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("EDGEKIT_HOME", str(folder / "home"))
        chance, rows = random.Random(arguments.seed), list[dict[str, Any]]()
        share = -(-arguments.count // arguments.shapes)
        for shape in range(arguments.first, arguments.first + arguments.shapes):
            artifact = built(folder, shape)
            plan = open_artifact(artifact).plan
            edgekit.open(artifact, context=256, prefixes=0).close()  # packs the weights, once
            for _ in range(min(share, arguments.count - len(rows))):
                row = measured(artifact, random_opening(chance, plan), arguments.cap)
                rows.append(row)
                print(json.dumps(row), flush=True)
    found = summary(rows)
    print(json.dumps(found, indent=1))
    if arguments.json:
        found |= {"cap": arguments.cap, "load_average": os.getloadavg()[0], "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
