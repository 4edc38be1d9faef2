"""Artifacts of one model on several engines, and peers on the same integers, in turns: prefill and decode.

    python -m examples.benchmarks.engine_turns NAME=ARTIFACT ... [--peers FOLDER] [--spin off,brief,on] \\
        [--processes 5] [--quiet-only] [--model "1.2 B parameters" -o results/engine_turns_intel.json]

Eight requests at once need artifacts that were exported with `--sequences 8`.

Every engine is opened in `--processes` processes of its own, all of the same artifact; processes take turns. A spin
setting other than `brief` is given to the engine as EDGEKIT_SPIN. With `--peers`, ik_llama.cpp (with packed weights,
with and without flash attention) and OpenVINO GenAI open the GGUF file of each artifact that has one, each in an
environment that is made in FOLDER once. Prompts are random tokens, new in each round, which no prefix cache knows.
Times are medians over processes of the least of the rounds of each; the share of cores that other programs used
meanwhile stands next to them, as do the tokens a second of eight requests at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import venv
from datetime import date
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from edgekit.apps.bench.machine import Machine

ROUNDS, DECODED, REST_S, CONTEXT, THREADS = 3, 32, 1.0, 4096, 2
TOGETHER, SHORT = 8, 64  # requests at once, and the tokens of the prompt of each
# Name → the packages of its environment, and its options.
PEERS = {
    "ik_llama.cpp": (("ik-llama-cpp-python==0.1.5",), ("repack_tensors",)),
    "ik_llama.cpp, flash attention": (("ik-llama-cpp-python==0.1.5",), ("repack_tensors", "flash_attn")),
    "OpenVINO GenAI": (("openvino-genai==2026.4.1.0", "numpy"), ()),
}


class Engine(Protocol):
    """An open engine: the tokens of its vocabulary, and the most requests at once."""

    vocabulary: int
    sequences: int

    def answer(self, prompts: list[list[int]]) -> tuple[float, float]:
        """Answer all prompts together; return the seconds until the first tokens, and of one of the next steps."""


class Edgekit:
    def __init__(self, folder: str) -> None:
        from edgekit.artifact.artifact import open_artifact

        artifact = open_artifact(Path(folder))
        self._plan = artifact.plan
        self._engine = artifact.working_target().open(artifact.plan, artifact.folder)
        self.vocabulary, self.sequences = artifact.plan.model.vocab_size, artifact.plan.sequences

    def answer(self, prompts: list[list[int]]) -> tuple[float, float]:
        from edgekit.contracts.engine import Chunk

        states = [self._engine.start(self._plan.storage) for _ in prompts]
        size, ends = self._plan.chunk_tokens, [0] * len(prompts)
        began = time.perf_counter()
        for number, (state, prompt) in enumerate(zip(states, prompts, strict=True)):
            for start in range(0, len(prompt), size):
                part = prompt[start : start + size]
                found = self._engine.forward([Chunk(state, part, int(start + len(part) == len(prompt)))])
            ends[number] = int(found[0].argmax())
        prompt_s, steps = time.perf_counter() - began, []
        for _ in range(DECODED):
            began = time.perf_counter()
            logits = self._engine.forward([Chunk(state, [token], 1) for state, token in zip(states, ends, strict=True)])
            ends = [int(each.argmax()) for each in logits]
            steps.append(time.perf_counter() - began)
        for state in states:
            state.close()
        return prompt_s, median(steps)


class IkLlamaCpp:
    def __init__(self, file: str, options: tuple[str, ...]) -> None:
        self._numpy, library = import_module("numpy"), import_module("ik_llama_cpp._ctypes_api")
        self._library = library
        library.llama_backend_init()
        model, context = library.llama_model_default_params(), library.llama_context_default_params()
        model.n_gpu_layers, model.repack_tensors = 0, "repack_tensors" in options
        self._model = library.llama_model_load_from_file(file.encode(), model)
        context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max = CONTEXT, 2048, 512, TOGETHER
        context.n_threads = context.n_threads_batch = THREADS
        context.flash_attn = "flash_attn" in options
        self._context = library.llama_init_from_model(self._model, context)
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch = library.llama_batch_init(2048, 0, 1)
        # With flash attention it aborts on a block of keys that is masked as a whole, as other sequences' are.
        self.sequences = 1 if "flash_attn" in options else TOGETHER

    def _decode(self, tokens: list[tuple[int, int, int]]) -> None:
        """Compute tokens, each with its position and its sequence; the last of each sequence gets logits."""
        batch, last = self._batch, {sequence: index for index, (_, _, sequence) in enumerate(tokens)}
        batch.n_tokens = len(tokens)
        for index, (token, position, sequence) in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0], batch.logits[index] = sequence, last[sequence] == index
        assert self._library.llama_decode(self._context, batch) == 0
        self._last = last

    def _tokens(self) -> list[int]:
        rows = (self._library.llama_get_logits_ith(self._context, index) for index in self._last.values())
        return [int(self._numpy.ctypeslib.as_array(row, shape=(self.vocabulary,)).argmax()) for row in rows]

    def answer(self, prompts: list[list[int]]) -> tuple[float, float]:
        self._library.llama_kv_cache_clear(self._context)
        given = [(token, at, number) for number, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        began = time.perf_counter()
        for start in range(0, len(given), 2048):
            self._decode(given[start : start + 2048])
        tokens = self._tokens()
        prompt_s, steps = time.perf_counter() - began, []
        for step in range(DECODED):
            began = time.perf_counter()
            self._decode([(token, len(prompts[0]) + step, number) for number, token in enumerate(tokens)])
            tokens = self._tokens()
            steps.append(time.perf_counter() - began)
        return prompt_s, median(steps)


class OpenVino:
    def __init__(self, file: str) -> None:
        self._numpy, self._openvino = import_module("numpy"), import_module("openvino")
        self._genai = import_module("openvino_genai")
        scheduling = self._genai.SchedulerConfig()
        scheduling.enable_prefix_caching, scheduling.cache_size = False, 1  # GB
        scheduling.max_num_batched_tokens = CONTEXT
        options = {"scheduler_config": scheduling, "INFERENCE_NUM_THREADS": THREADS}
        self._pipeline = self._genai.LLMPipeline(file, "CPU", **options)
        self.vocabulary, self.sequences = len(self._pipeline.get_tokenizer().get_vocab()), TOGETHER

    def answer(self, prompts: list[list[int]]) -> tuple[float, float]:
        ids = self._numpy.array(prompts, dtype="int64")
        asked = self._genai.TokenizedInputs(
            self._openvino.Tensor(ids), self._openvino.Tensor(self._numpy.ones_like(ids))
        )
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = DECODED + 1, True, False
        began = time.perf_counter()
        prompt_s = self._pipeline.generate(asked, config).perf_metrics.get_ttft().mean / 1000
        return prompt_s, (time.perf_counter() - began - prompt_s) / DECODED


def opened(kind: str, path: str) -> Engine:
    if kind not in PEERS:
        return Edgekit(path)
    return OpenVino(path) if kind.startswith("OpenVINO") else IkLlamaCpp(path, PEERS[kind][1])


def child(kind: str, path: str, lengths: list[int]) -> None:
    """Open an engine and answer every line with the seconds of each prompt and of a step after it."""
    engine = opened(kind, path)
    for number, line in enumerate(sys.stdin):
        if line.startswith("rest"):
            before = time.process_time()
            time.sleep(REST_S)
            print(json.dumps({"idle": time.process_time() - before}), flush=True)
            continue
        draw = random.Random(number)

        def prompts(count: int, length: int) -> list[list[int]]:
            return [[draw.randrange(engine.vocabulary) for _ in range(length)] for _ in range(count)]  # noqa: B023

        answer = {str(length): engine.answer(prompts(1, length)) for length in lengths}
        if engine.sequences >= TOGETHER:
            answer[f"{TOGETHER} at once"] = engine.answer(prompts(TOGETHER, SHORT))
        print(json.dumps(answer), flush=True)


def environment_of(peer: str, folder: Path) -> str:
    """Return the Python of a peer's environment, which is made once."""
    packages = PEERS[peer][0]
    place = folder / packages[0].replace("==", "-")
    if not place.exists():
        staging = place.with_suffix(".part")
        venv.create(staging, clear=True, with_pip=True)
        subprocess.run([staging / "bin/python", "-m", "pip", "install", "--quiet", *packages], check=True)
        staging.rename(place)
    return str(place / "bin/python")


def start(kind: str, path: str, spin: str, python: str, prompts: str) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    environment.pop("EDGEKIT_SPIN", None)
    if spin != "brief":
        environment["EDGEKIT_SPIN"] = spin
    words = [python, "-m", "examples.benchmarks.engine_turns", "--child", kind, path, "--prompts", prompts]
    return subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )


def ask(process: subprocess.Popen[str], what: str) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(what + "\n")
    process.stdin.flush()
    while not (line := process.stdout.readline()).startswith("{"):  # libraries print what they found
        if not line:
            raise SystemExit(f"{' '.join(map(str, process.args))}: ended with code {process.wait()}")  # type: ignore[arg-type]
    answer: dict[str, Any] = json.loads(line)
    return answer


def measured(processes: dict[str, list[subprocess.Popen[str]]], machine: Machine) -> dict[str, Any]:
    """One phase: every process of every subject in turns, `ROUNDS` times."""
    own = [each.pid for group in processes.values() for each in group]
    best: dict[str, list[dict[str, list[float]]]] = {name: [{} for _ in group] for name, group in processes.items()}
    before = machine.usage(own)
    for _ in range(ROUNDS):
        for index in range(max(map(len, processes.values()))):
            for name, group in processes.items():
                for prompt, times in ask(group[index], "run").items():
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


def _beside_neighbour(processes: dict[str, list[subprocess.Popen[str]]], machine: Machine) -> dict[str, Any]:
    """Measure two processes of each subject while another process keeps one core busy."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        # Threads of ik_llama.cpp wait for each other by spinning: next to a busy process a step takes seconds.
        return measured({name: group[:2] for name, group in processes.items() if name not in PEERS}, machine)
    finally:
        neighbour.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifacts", nargs="*", metavar="NAME=ARTIFACT")
    parser.add_argument("--spin", default="off,brief,on")
    parser.add_argument("--prompts", default="128,512")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--peers", type=Path, help="a folder for the environments of ik_llama.cpp and OpenVINO GenAI")
    parser.add_argument("--quiet-only", action="store_true", help="do not measure next to a busy process too")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "PATH"))
    parser.add_argument("--model", help="what the output file calls the artifacts' model")
    parser.add_argument("--output", "-o", type=Path, help="a file to which the model is added")
    arguments = parser.parse_args()
    if arguments.child:
        kind, path = arguments.child
        child(kind, path, [int(prompt) for prompt in arguments.prompts.split(",")])
        return
    from edgekit.apps.bench.machine import Machine

    machine = Machine()
    named = [(name, folder) for name, _, folder in (artifact.partition("=") for artifact in arguments.artifacts)]
    openings = {
        f"{name} {spin}": ("edgekit", folder, spin, sys.executable)
        for name, folder in named
        for spin in arguments.spin.split(",")
    }
    for file in [Path(folder, "model.gguf") for _, folder in named if arguments.peers]:
        if file.exists():
            openings |= {peer: (peer, str(file), "brief", environment_of(peer, arguments.peers)) for peer in PEERS}
    processes = {
        name: [start(*words, prompts=arguments.prompts) for _ in range(arguments.processes)]
        for name, words in openings.items()
    }
    try:
        for group in processes.values():
            for each in group:
                ask(each, "run")  # opens and warms up
        found = {"quiet": measured(processes, machine)}
        found["idle_seconds_of_processor_a_second"] = {
            name: round(median(ask(each, "rest")["idle"] for each in group), 4) for name, group in processes.items()
        }
        if not arguments.quiet_only:
            found["beside_one_busy_process"] = _beside_neighbour(processes, machine)
    finally:
        for group in processes.values():
            for each in group:
                each.kill()
    print(json.dumps(found, indent=1))
    if arguments.output:
        known = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        stored = {**known, "measured": date.today().isoformat(), arguments.model: found}
        arguments.output.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
