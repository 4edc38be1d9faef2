"""The onnx target beside other engines on the same integers, at the shapes of Llama 3.2 1B with random weights.

    python -m examples.benchmarks.onnx_peers FOLDER --peer-python PYTHON [--recipe s4-g128] [-o results/peers.json]
    python -m examples.benchmarks.onnx_peers FOLDER --peer-python PYTHON --recipe all-s4 [-o results/peers.json]

PYTHON is one with llama-cpp-python, onnxruntime-genai, onnx, onnx-ir, torch and transformers. The weights and what is
made of them stay in FOLDER, 5 GB of it, for the next time. With `all-s4`, embedding and head have 4 bits as
everything else: for llama.cpp that is a pure Q4_0. Otherwise llama.cpp runs twice: with the head of 8 bits that
the integers have, and with the Q6_K to which it would round a head by itself.

Waiting threads of llama.cpp spin. Those of edgekit sleep unless told otherwise, so edgekit runs twice too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from edgekit_onnx import OnnxTarget

from edgekit import OpenOptions
from edgekit.apps.bench.artifact_subjects import subject_of_artifact
from edgekit.apps.bench.machine import Machine
from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.bench.peers.subjects import peer_of
from edgekit.apps.bench.run import measure_conditions
from edgekit.apps.bench.subject import Subject
from edgekit.apps.bench.trials import BenchRun, PreparedSubject
from edgekit.apps.bench.workload import Case, PromptText, Workload, WorkloadRequest
from edgekit.artifact.artifact import Artifact, open_artifact, seal
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Estimate, MemoryFacts, Plan, Quality, Speed
from edgekit.contracts.recipe import Format, Recipe, Rule, named_recipe
from edgekit.model.source import open_source
from edgekit.quant.random_weights import random_weights
from edgekit.runtime.generation.tokenizer import read_codec
from examples.benchmarks.random_artifacts import LLAMA_1B

PROMPT, ANSWER, CONTEXT = 512, 64, 4096
ALL_S4 = Recipe(name="all-s4", rules=(Rule(pattern="*", format=Format(kind="s4", group=128)),))
Q6_K_BITS = 210 * 8 / 256
# What has the format already stays as it is: only the head is rounded anew.
OWN_HEAD = """
import sys, llama_cpp
asked = llama_cpp.llama_model_quantize_default_params()
asked.ftype, asked.allow_requantize, asked.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True, 2
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), asked))
"""


def plan_of(weights: NeutralWeights, threads: int) -> Plan:
    return Plan(
        model=weights.model, model_source="random", model_sha256="0" * 64, device="this", device_sha256="0" * 64,
        os_version="0", target="onnx", backend="cpu", recipe=weights.recipe, context=CONTEXT, sequences=2,
        chunk_tokens=PROMPT, cache=KVEvictionPolicy(), storage=KVCacheConfig(capacity_tokens=CONTEXT, kv_bits=32),
        threads=threads,
        estimate=Estimate(
            mapped_weights_bytes=0, private_weights_bytes=0, kv_bytes=0, activation_bytes=0, runtime_bytes=0
        ),
        memory=MemoryFacts(runtime_bytes=0, source="none"),
        budget_bytes=0, budget_why="figures", speed=Speed(
            prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0, first_token_s=1.0, basis="none"
        ),
        quality=Quality(kl=0.0, same_top=1.0, basis="prior", source="none"),
    )  # fmt: skip


def made(folder: Path, recipe: str, threads: int) -> Path:
    """The artifact, with the demo's tokenizer: a random model has none of its own."""
    artifact, staging = folder / "artifact", folder / "staging"
    if artifact.exists():
        return artifact
    weights = random_weights(
        folder / "neutral", LLAMA_1B, ALL_S4 if recipe == ALL_S4.name else named_recipe(recipe), "llama-1b-shapes"
    )
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


def spinning(subject: Subject) -> Subject:
    """Return the subject with threads that spin between operators."""
    info = subject.info.model_copy(update={"name": f"{subject.info.name}, spinning"})
    return subject._replace(info=info, command=("env", "EDGEKIT_SPIN=on", *subject.command))


def with_its_own_head(subject: Subject, folder: Path, python: str, artifact: Artifact) -> Subject:
    """llama.cpp on the same linears, with the embedding and head that its own Q4_0 would have."""
    file, head = folder / "own-head.gguf", artifact.plan.model.vocab_size * artifact.plan.model.hidden_size
    if not file.exists():
        part = file.with_suffix(".part")
        words = [python, "-c", OWN_HEAD, subject.opening["files"], str(part)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        part.rename(file)
    formats = subject.info.formats.model_copy(
        update={"embedding": "Q6_K", "head": "Q6_K, tied", "same_integers": False, "file_bytes": file.stat().st_size}
    )
    saved = subject.info.formats.file_bytes - formats.file_bytes
    assert abs(saved - head * (8.5 - Q6_K_BITS) / 8) < saved / 5, "only the head became smaller"
    info = subject.info.model_copy(update={"name": f"{subject.info.name}, head of its own", "formats": formats})
    opening = {**subject.opening, "files": str(file)}
    return subject._replace(info=info, opening=opening, weight_bytes=subject.weight_bytes - saved)


def engine_row(found: Measurement) -> dict[str, Any]:
    """What a page shows of one engine: medians of its speeds, and memory of its whole process."""
    speeds, formats = found.cases[0].summary, found.subject.formats
    return {
        "engine": found.subject.name,
        "version": found.subject.engine_version,
        "linears": formats.linears,
        "head": formats.head,
        "file_bytes": formats.file_bytes,
        "cache_bits": found.subject.kv_bits,
        "prefill_tokens_per_s": round(speeds["prefill_tokens_per_s"].median, 2),
        "decode_tokens_per_s": round(speeds["decode_tokens_per_s"].median, 2),
        "decode_spread": round(speeds["decode_tokens_per_s"].spread, 3),
        "first_token_s": round(speeds["first_token_s"].median, 3),
        "private_bytes": found.memory.anonymous_bytes,
        "peak_bytes": found.memory.peak_bytes,
        "load_s": [round(seconds, 2) for seconds in found.load_s],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--recipe", default="s4-g128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", "-o", type=Path)
    arguments = parser.parse_args()
    request = WorkloadRequest(prompt=(PromptText(synthetic="prose", seed=1, tokens=PROMPT),), output_tokens=ANSWER)
    workload = Workload(
        name="decode-512",
        title="A prompt of 512 tokens and 64 more, as in the figures of other engines.",
        repeats=arguments.repeats,
        cases=(Case(name=f"{PROMPT} in, {ANSWER} out", requests=(request,)),),
    )
    artifact = open_artifact(made(arguments.folder, arguments.recipe, arguments.threads))
    weights = NeutralWeights.open(arguments.folder / "neutral")
    python = arguments.peer_python

    def peer(name: str) -> Subject:
        return peer_of(name, artifact, weights, context=CONTEXT, python=python)

    ours = subject_of_artifact(artifact.folder, OpenOptions())._replace(
        predicted=None
    )  # a random model's plan predicts nothing
    subjects = [ours, spinning(ours), peer("llama.cpp")]
    if arguments.recipe != ALL_S4.name:
        subjects += [with_its_own_head(subjects[-1], arguments.folder, python, artifact), peer("onnxruntime-genai")]
    codec, machine = read_codec(artifact.folder), Machine()
    found = BenchRun(
        [
            PreparedSubject(
                subject, artifact.plan.model, lambda text, begins: codec.encode(text, add_special_tokens=begins)
            )
            for subject in subjects
        ],
        workload,
        machine,
        lambda: measure_conditions(machine),
        loads=2,
        progress=lambda done, total, what: print(f"{done / total:.0%} {what}", file=sys.stderr),
    ).run()
    conditions = found[0].conditions
    stored = {
        "model": "llama-1b-shapes",
        "recipe": arguments.recipe,
        "prompt_tokens": PROMPT,
        "answer_tokens": ANSWER,
        "context": CONTEXT,
        "threads": arguments.threads,
        "machine": f"{conditions.machine}, {conditions.cores} cores",
        "measured": conditions.measured_at[:10],
        "engines": [engine_row(each) for each in found],
    }
    text = json.dumps(stored, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
