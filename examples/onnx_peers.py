"""The onnx target beside other engines on the same integers, at the shapes of Llama 3.2 1B with random weights.

    python examples/onnx_peers.py FOLDER --peer-python PYTHON [--recipe s4-g128] [-o REPORT.json]
    python examples/onnx_peers.py FOLDER --peer-python PYTHON --recipe all-s4 [-o REPORT.json]

PYTHON is one with llama-cpp-python, onnxruntime-genai, onnx, onnx-ir, torch and transformers. The weights and what is
made of them stay in FOLDER, 4 GB of it, for the next time. With `all-s4`, embedding and head have 4 bits in groups of
32 as everything else: for llama.cpp that is a pure Q4_0.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from edgekit_onnx import OnnxTarget
from onnx_figures import LLAMA_1B, plan_of, random_weights

from edgekit.artifact import seal
from edgekit.measure.contest import bench
from edgekit.measure.entrants import Opening
from edgekit.measure.results import Report
from edgekit.measure.workload import Case, Request, Text, Workload
from edgekit.recipe import Format, Recipe, Rule, named_recipe
from edgekit.source import open_source

PROMPT, ANSWER = 512, 64
ALL_S4 = Recipe(name="all-s4", rules=(Rule(pattern="*", format=Format(kind="s4", group=32)),))


def made(folder: Path, recipe: str, threads: int) -> Path:
    """The artifact, with the demo's tokenizer: a random model has none of its own."""
    artifact, staging = folder / "artifact", folder / "staging"
    if artifact.exists():
        return artifact
    weights = random_weights(folder / "neutral", ALL_S4 if recipe == ALL_S4.name else named_recipe(recipe))
    (folder / "neutral" / "config.json").write_text(json.dumps({**LLAMA_1B, "architectures": ["LlamaForCausalLM"]}))
    demo = open_source("demo").folder
    staging.mkdir(parents=True)
    plan = plan_of(weights, threads)
    OnnxTarget().export(plan, weights, staging, lambda done, total, what: None)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        for place in (staging, folder / "neutral"):
            shutil.copy(demo / name, place)
    seal(staging, artifact, plan, weights_sha256=weights.sha256, tools={}, self_check="none: random weights")
    return artifact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--recipe", default="s4-g128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--spin", action="store_true", help="idle threads spin between operators, as llama.cpp's do")
    parser.add_argument("--output", "-o", type=Path)
    arguments = parser.parse_args()
    if arguments.spin:
        os.environ["EDGEKIT_SPIN"] = "on"
    request = Request(prompt=(Text(synthetic="prose", seed=1, tokens=PROMPT),), output_tokens=ANSWER)
    workload = Workload(
        name="decode-512",
        title="A prompt of 512 tokens and 64 more, as in the figures of other engines.",
        repeats=arguments.repeats,
        cases=(Case(name=f"{PROMPT} in, {ANSWER} out", requests=(request,)),),
    )
    found = bench(
        [made(arguments.folder, arguments.recipe, arguments.threads)],
        workload,
        opening=Opening(None, None, 0, False, None),
        against=("llama.cpp",) if arguments.recipe == ALL_S4.name else ("llama.cpp", "onnxruntime-genai"),
        peer_python=arguments.peer_python,
        weights=arguments.folder / "neutral",
        loads=2,
        progress=lambda done, total, what: print(f"{done / total:.0%} {what}", file=sys.stderr),
    )
    # The plan of a random model predicts nothing.
    report = Report(
        title=f"The onnx target beside other engines: 1.2 B parameters, random weights, {arguments.recipe}",
        measurements=tuple(one.model_copy(update={"predicted": None}) for one in found),
        notes=(
            "onnxruntime-genai's folder has its embedding and head in float32; llama.cpp has groups of 32.",
            f"Idle threads of edgekit {'spin' if arguments.spin else 'sleep'}; those of llama.cpp spin.",
        ),
    )
    print(report.model_dump_json(indent=1))
    if arguments.output:
        arguments.output.write_text(report.model_dump_json(indent=1) + "\n")


if __name__ == "__main__":
    main()
