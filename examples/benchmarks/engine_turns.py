"""Artifacts of one model on several engines, and peers on the same integers, in turns: prefill, decode and memory.

    python -m examples.benchmarks.engine_turns NAME=ARTIFACT ... [--peers FOLDER] [--spin off,brief,on] \\
        [--processes 5] [--quiet-only] [--model "1.2 B parameters" -o results/engine_turns_intel.json]
    python -m examples.benchmarks.engine_turns onnx=ARTIFACT --against llama.cpp,onnxruntime-genai \\
        --peer-python PYTHON --spin off,on --prompts 512 --processes 2 --quiet-only \\
        [--model "1.2 B parameters" -o results/peers.json]

Eight requests at once need artifacts that were exported with `--sequences 8`.

Every engine is a subject of `edgekit bench`, opened in `--processes` separate processes, all of the same artifact;
processes take turns. A spin setting other than `brief` is given to the engine as EDGEKIT_SPIN. With `--peers`,
ik_llama.cpp (with packed weights, with and without flash attention) and OpenVINO GenAI open the GGUF file of each
artifact that has one, each in an environment that is made in FOLDER once. With `--against`, peers of `edgekit bench`
get the integers of the first artifact, in a Python that has them. llama.cpp then runs twice: with the head of 8 bits
that the integers have, and with the Q6_K to which it would round a head by itself.

Prompts are random tokens, new in each round, which no prefix cache knows. Times are medians over processes of the least
of the rounds of each; the share of cores that other programs used meanwhile stands next to them, as do the tokens a
second of eight requests at once.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import venv
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from edgekit import Artifact, OpenOptions, open_artifact
from edgekit.apps.bench.artifact_subjects import subject_of_artifact
from edgekit.apps.bench.machine import Machine
from edgekit.apps.bench.peers.subjects import peer_of, weights_of
from edgekit.apps.bench.subject import RunningSubject, Subject
from edgekit.common.files import home

ROUNDS, DECODED, REST_S, CONTEXT, THREADS = 3, 32, 5.0, 4096, 2
TOGETHER, SHORT = 8, 64  # requests at once, and the tokens of the prompt of each
# Name → the package of its environment, and the most requests at once. With flash attention ik_llama.cpp aborts on a
# block of keys that is masked as a whole, as other sequences' are.
PEERS = {
    "ik_llama.cpp": ("ik-llama-cpp-python==0.1.5", TOGETHER),
    "ik_llama.cpp, flash attention": ("ik-llama-cpp-python==0.1.5", 1),
    "OpenVINO GenAI": ("openvino-genai==2026.4.1.0", TOGETHER),
}
Q6_K_BITS = 210 * 8 / 256
# What has the format already stays as it is: only the head is rounded anew.
OWN_HEAD = """
import sys, llama_cpp
asked = llama_cpp.llama_model_quantize_default_params()
asked.ftype, asked.allow_requantize, asked.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True, 2
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), asked))
"""

Running = dict[str, list[RunningSubject]]


def renamed(subject: Subject, name: str, **changed: Any) -> Subject:
    return subject._replace(info=subject.info.model_copy(update={"name": name, **changed}))


def own_subjects(name: str, artifact: Artifact, spins: list[str]) -> list[Subject]:
    """The subjects of an artifact, one for each setting of waiting threads."""
    most = TOGETHER if artifact.plan.sequences >= TOGETHER else None
    subject = subject_of_artifact(artifact.folder, OpenOptions(sequences=most))
    settings = {spin: f"EDGEKIT_SPIN={spin}" if spin != "brief" else "--unset=EDGEKIT_SPIN" for spin in spins}
    return [
        renamed(subject, f"{name} {spin}")._replace(command=("env", setting, *subject.command))
        for spin, setting in settings.items()
    ]


def peer_subject(peer: str, like: Subject, file: Path, environments: Path) -> Subject:
    """The subject of an engine of `peer_engines`, on the GGUF file of an artifact."""
    package, most = PEERS[peer]
    subject = renamed(like, peer, engine=peer, kv_bits=0, sequences=most)
    return subject._replace(
        command=(environment_of(package, environments), "-m", "examples.benchmarks.peer_engines", peer),
        opening={"files": str(file), "context": CONTEXT, "threads": THREADS},
    )


def environment_of(package: str, folder: Path) -> str:
    """Return the Python of a peer's environment, which is made once."""
    place = folder / package.replace("==", "-")
    if not place.exists():
        staging = place.with_suffix(".part")
        venv.create(staging, clear=True, with_pip=True)
        subprocess.run([staging / "bin/python", "-m", "pip", "install", "--quiet", package, "numpy"], check=True)
        staging.rename(place)
    return str(place / "bin/python")


def with_its_own_head(subject: Subject, python: str, artifact: Artifact) -> Subject:
    """llama.cpp on the same linears, with the embedding and head that its own Q4_0 would have."""
    head = artifact.plan.model.vocab_size * artifact.plan.model.hidden_size
    file = home() / "engine_turns" / f"{artifact.manifest.weights_sha256}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        words = [python, "-c", OWN_HEAD, subject.opening["files"], str(part)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        part.rename(file)
    size, rounded = file.stat().st_size, {"embedding": "Q6_K", "head": "Q6_K, tied", "same_integers": False}
    saved = subject.info.formats.file_bytes - size
    assert abs(saved - head * (8.5 - Q6_K_BITS) / 8) < saved / 5, "only the head became smaller"
    formats = subject.info.formats.model_copy(update={**rounded, "file_bytes": size})
    own = renamed(subject, f"{subject.info.name}, head of its own", formats=formats)
    return own._replace(opening={**subject.opening, "files": str(file)})


def subjects_of(arguments: argparse.Namespace) -> list[Subject]:
    named = [(name, open_artifact(path)) for name, _, path in (each.partition("=") for each in arguments.artifacts)]
    found = []
    for name, artifact in named:
        found += own_subjects(name, artifact, arguments.spin.split(","))
        file = artifact.folder / "model.gguf"
        if arguments.peers and file.exists():
            found += [peer_subject(peer, found[-1], file, arguments.peers) for peer in PEERS]
    artifact = named[0][1]
    for name in arguments.against.split(",") if arguments.against else ():
        weights, python = weights_of(artifact), arguments.peer_python or sys.executable
        found.append(peer_of(name, artifact, weights, context=CONTEXT, python=python))
        if name == "llama.cpp":
            found.append(with_its_own_head(found[-1], python, artifact))
    return found


def fastest(running: Running, machine: Machine, lengths: list[int], vocabulary: int) -> dict[str, Any]:
    """One phase: every process of every subject in turns, `ROUNDS` times."""
    own = [each.process_id for group in running.values() for each in group]
    best: dict[str, list[dict[str, list[float]]]] = {name: [{} for _ in group] for name, group in running.items()}
    before = machine.usage(own)
    for number in range(ROUNDS):
        for index in range(max(map(len, running.values()))):
            for name, group in running.items():
                for prompt, times in answered(group[index], lengths, vocabulary, f"round {number}").items():
                    known = best[name][index].get(prompt, times)
                    best[name][index][prompt] = [min(pair) for pair in zip(known, times, strict=True)]
    others = machine.between(before, machine.usage(own)).others_share
    result: dict[str, Any] = {"others_share_of_cores": others}
    for name, each in best.items():
        together = f"{TOGETHER} at once"
        result[name] = {
            prompt: {
                "prefill_tokens_per_s": round(int(prompt) / median(times[prompt][0] for times in each), 1),
                "decode_tokens_per_s": round(1 / median(times[prompt][1] for times in each), 1),
                "decode_of_processes": [round(1 / times[prompt][1], 1) for times in each],
            }
            for prompt in each[0]
            if prompt != together
        }
        if together in each[0]:
            step_s = median(times[together][1] for times in each)
            result[name][together] = {"decode_tokens_per_s": round(TOGETHER / step_s, 1)}
    return result


def answered(subject: RunningSubject, lengths: list[int], vocabulary: int, trial: str) -> dict[str, list[float]]:
    """Run a prompt of each length, then short ones at once: the seconds of the prompt, and of a step after it."""
    draw, found = random.Random(trial), {}
    asked = {str(length): (1, length) for length in lengths}
    if subject.subject.info.sequences >= TOGETHER:
        asked[f"{TOGETHER} at once"] = TOGETHER, SHORT
    for what, (count, length) in asked.items():
        prompts = [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]
        times = [each for each, _ in subject.run_together(prompts, 0, DECODED + 1, trial)]
        found[what] = [max(each.prefill_s for each in times), median(gap for each in times for gap in each.gaps_s)]
    return found


def idle(running: Running, machine: Machine) -> dict[str, float]:
    """The seconds of a core that a process uses in a second without requests."""

    def used() -> dict[str, list[float]]:
        return {
            name: [machine.usage([each.process_id]).own_s or 0.0 for each in group] for name, group in running.items()
        }

    before = used()
    time.sleep(REST_S)
    return {
        name: round(median(later - sooner for sooner, later in zip(before[name], now, strict=True)) / REST_S, 4)
        for name, now in used().items()
    }


def described(group: list[RunningSubject]) -> dict[str, Any]:
    """What a page shows of an engine besides its speed, with the memory of its whole process."""
    info, memory = group[0].info(), group[0].memory()
    return {
        "version": info.engine_version,
        "recipe": info.recipe,
        "linears": info.formats.linears,
        "head": info.formats.head,
        "file_bytes": info.formats.file_bytes,
        "cache_bits": info.kv_bits,
        "private_bytes": memory.anonymous_bytes,
        "peak_bytes": memory.peak_bytes,
        "load_s": [round(each.load_s, 2) for each in group],
    }


def beside_neighbour(running: Running, machine: Machine, lengths: list[int], vocabulary: int) -> dict[str, Any]:
    """Measure two processes of each subject while another process keeps one core busy."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        # Threads of ik_llama.cpp wait for each other by spinning: next to a busy process a step takes seconds.
        some = {name: group[:2] for name, group in running.items() if name not in PEERS}
        return fastest(some, machine, lengths, vocabulary)
    finally:
        neighbour.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifacts", nargs="+", metavar="NAME=ARTIFACT")
    parser.add_argument("--spin", default="off,brief,on")
    parser.add_argument("--prompts", default="128,512")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--peers", type=Path, help="a folder for the environments of ik_llama.cpp and OpenVINO GenAI")
    parser.add_argument("--against", help="peers of `edgekit bench`, such as llama.cpp,onnxruntime-genai")
    parser.add_argument("--peer-python", help="the Python with the packages of --against, instead of this one")
    parser.add_argument("--quiet-only", action="store_true", help="do not measure next to a busy process too")
    parser.add_argument("--model", help="what the output file calls the artifacts' model")
    parser.add_argument("--output", "-o", type=Path, help="a file to which the model is added")
    arguments = parser.parse_args()
    machine, subjects = Machine(), subjects_of(arguments)
    lengths = [int(prompt) for prompt in arguments.prompts.split(",")]
    vocabulary = open_artifact(arguments.artifacts[0].partition("=")[2]).plan.model.vocab_size
    with ExitStack() as stack:
        running: Running = {
            subject.info.name: [stack.enter_context(RunningSubject(subject)) for _ in range(arguments.processes)]
            for subject in subjects
        }
        for group in running.values():
            for each in group:
                answered(each, lengths, vocabulary, "warm-up")
        found = {"quiet": fastest(running, machine, lengths, vocabulary)}
        found["subjects"] = {name: described(group) for name, group in running.items()}
        found["idle_seconds_of_processor_a_second"] = idle(running, machine)
        if not arguments.quiet_only:
            found["beside_one_busy_process"] = beside_neighbour(running, machine, lengths, vocabulary)
    print(json.dumps(found, indent=1))
    if arguments.output:
        known = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        stored = {**known, "measured": date.today().isoformat(), arguments.model: found}
        arguments.output.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
