"""The program of a benchmark's subject: it opens one engine and answers messages over its pipes.

A message is a JSON object after its length in four bytes, big-endian. The program must run in any Python with the
engine, so it imports only the standard library, numpy and the engine. Times are seconds since the request began.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol


class OpenedEngine(Protocol):
    """An open engine; `facts` are sent as the answer to `open`."""

    facts: dict[str, Any]

    def run(self, request: dict[str, Any]) -> dict[str, Any]: ...

    def close(self) -> None: ...


def serve(open_engine: Callable[[dict[str, Any]], OpenedEngine]) -> None:
    """Answer every message until stdin closes; an exception becomes an answer."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of the engine go to stderr
    engine: OpenedEngine | None = None
    while len(size := source.read(4)) == 4:
        try:
            request = json.loads(source.read(int.from_bytes(size, "big")))
            answer: dict[str, Any] = {}
            if request["op"] == "open":
                began = perf_counter()
                engine = open_engine(request)
                answer = {"open_s": perf_counter() - began, **engine.facts}
            elif request["op"] == "memory":
                answer = memory() | getattr(engine, "report", dict)()
            elif request["op"] == "close":
                if engine is not None:
                    engine.close()
                engine = None
            else:
                assert engine is not None
                answer = engine.run(request)
        except Exception as error:
            answer = {
                "error": " ".join(str(error).split())[:1000] or type(error).__name__,
                "kind": type(error).__name__,
            }
        data = json.dumps(answer).encode()
        sink.write(len(data).to_bytes(4, "big") + data)
        sink.flush()


def memory() -> dict[str, Any]:
    """Return the memory of this process, as the OS counts it."""
    counters: dict[str, Any] = {}
    for path in ("/proc/self/status", "/proc/self/smaps_rollup"):
        with suppress(OSError):
            for line in Path(path).read_text().splitlines():
                name, _, value = line.partition(":")
                if value.endswith(" kB"):
                    counters[name] = int(value[:-3]) << 10
    if "VmHWM" in counters:
        return {
            "peak_bytes": counters["VmHWM"],
            "peak_counter": "VmHWM of /proc/PID/status",
            "pss_bytes": counters.get("Pss"),
            "anonymous_bytes": counters.get("RssAnon"),
            "rss_bytes": counters.get("VmRSS"),
        }
    if sys.platform == "win32":
        return {"peak_bytes": None, "peak_counter": "this OS reports no peak"}
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_bytes": peak if sys.platform == "darwin" else peak << 10, "peak_counter": "ru_maxrss of getrusage"}


def timed(first: Callable[[Sequence[int]], int], request: dict[str, Any]) -> dict[str, Any]:
    """Run a request on an engine that maps tokens to the next one; return its times and tokens."""
    (tokens,), depth, outputs = request["prompts"], request["depth"], request["outputs"]
    began, marks = perf_counter(), [(0, 0.0)]
    if depth:
        first(tokens[:depth])
        marks.append((depth, perf_counter() - began))
    chosen = [first(tokens[depth:])]
    times = [perf_counter() - began]
    while len(chosen) < outputs:
        chosen.append(first([chosen[-1]]))
        times.append(perf_counter() - began)
    return {"answers": [{"marks": marks, "times": times, "tokens": chosen}]}


class LlamaCpp:
    """llama-cpp-python on a GGUF file."""

    def __init__(self, request: dict[str, Any]) -> None:
        import numpy as np

        self._np, self._vendor = np, import_module("llama_cpp")
        self._model = self._vendor.Llama(
            request["files"], n_ctx=request["context"], n_threads=request["threads"],
            n_threads_batch=request["threads"], n_batch=512, verbose=False, logits_all=False,
        )  # fmt: skip
        self.facts = {"version": version("llama-cpp-python"), "kv_bits": 16}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        self._model.reset()
        return timed(self._next, request)

    def _next(self, tokens: Sequence[int]) -> int:
        self._model.eval(list(tokens))
        logits = self._vendor.llama_get_logits_ith(self._model.ctx, -1)
        return int(self._np.ctypeslib.as_array(logits, shape=(self._model.n_vocab(),)).argmax())

    def close(self) -> None:
        self._model.close()


class Genai:
    """onnxruntime-genai on a folder that its builder makes from the given integers."""

    def __init__(self, request: dict[str, Any]) -> None:
        folder = Path(request["files"])
        built = folder / "built"
        if not (built / "genai_config.json").exists():
            self._build(folder, built)
        config_file = built / "genai_config.json"
        config = json.loads(config_file.read_text())
        config["search"]["max_length"] = request["context"]
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = request["threads"]
        config_file.write_text(json.dumps(config))
        began = perf_counter()
        self._genai = import_module("onnxruntime_genai")
        self._model = self._genai.Model(str(built))
        self._context = request["context"]
        size = sum(path.stat().st_size for path in built.iterdir())
        # The build runs once and is not part of the load time.
        opened_s = perf_counter() - began
        self.facts = {"version": version("onnxruntime-genai"), "kv_bits": 32, "file_bytes": size, "open_s": opened_s}

    @staticmethod
    def _build(folder: Path, built: Path) -> None:
        import subprocess

        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(built)]
        command += ["-p", "int4", "-e", "cpu", "--extra_options", "fuse_qkv=false", "shared_embeddings=false"]
        command += ["nodes_to_exclude=/lm_head/MatMul", "accuracy_level=4"]
        settings = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=settings)
        if done.returncode:
            raise RuntimeError(f"onnxruntime-genai's builder failed: {done.stderr.strip().splitlines()[-1:]}")

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        (tokens,), depth, outputs = request["prompts"], request["depth"], request["outputs"]
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(max_length=self._context, min_length=self._context, do_sample=False)
        generator = self._genai.Generator(self._model, parameters)
        began, marks = perf_counter(), [(0, 0.0)]
        if depth:
            generator.append_tokens(tokens[:depth])
            marks.append((depth, perf_counter() - began))
        generator.append_tokens(tokens[depth:])
        chosen: list[int] = []
        times: list[float] = []
        while len(chosen) < outputs:
            generator.generate_next_token()
            chosen.append(int(generator.get_next_tokens()[0]))
            times.append(perf_counter() - began)
        return {"answers": [{"marks": marks, "times": times, "tokens": chosen}]}

    def close(self) -> None:
        del self._model


class MlxLm:
    """mlx-lm on an MLX folder."""

    def __init__(self, request: dict[str, Any]) -> None:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        self._mx, self._make = mx, make_prompt_cache
        self._model = load_model(Path(request["files"]))[0]
        mx.eval(self._model.parameters())
        self.facts = {"version": version("mlx-lm"), "kv_bits": 32}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        cache = self._make(self._model)

        def next_token(tokens: Sequence[int]) -> int:
            logits = self._model(self._mx.array([list(tokens)]), cache=cache)
            return int(self._mx.argmax(logits[0, -1]).item())

        return timed(next_token, request)

    def close(self) -> None:
        del self._model


ENGINES: dict[str, Callable[[dict[str, Any]], OpenedEngine]] = {
    "llama.cpp": LlamaCpp,
    "onnxruntime-genai": Genai,
    "mlx-lm": MlxLm,
}


if __name__ == "__main__":
    serve(ENGINES[sys.argv[1]])
