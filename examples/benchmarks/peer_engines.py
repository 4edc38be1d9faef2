"""Engines that only `engine_turns` measures, as programs of a subject, for environments without edgekit's packages.

python -m examples.benchmarks.peer_engines NAME
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from time import perf_counter
from typing import Any

from edgekit.apps.bench.peers.program import OpenedEngine, serve

MOST_AT_ONCE, BATCH = 8, 2048


class IkLlamaCpp:
    """ik_llama.cpp on a GGUF file, its weights packed."""

    def __init__(self, request: dict[str, Any], *, flash_attention: bool = False) -> None:
        self._numpy, library = import_module("numpy"), import_module("ik_llama_cpp._ctypes_api")
        self._library = library
        library.llama_backend_init()
        model, context = library.llama_model_default_params(), library.llama_context_default_params()
        model.n_gpu_layers, model.repack_tensors = 0, True
        self._model = library.llama_model_load_from_file(request["files"].encode(), model)
        context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max = (
            request["context"],
            BATCH,
            512,
            MOST_AT_ONCE,
        )
        context.n_threads = context.n_threads_batch = request["threads"]
        context.flash_attn = flash_attention
        self._context = library.llama_init_from_model(self._model, context)
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch = library.llama_batch_init(BATCH, 0, 1)
        self.facts = {"version": version("ik-llama-cpp-python"), "kv_bits": 16}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer all prompts together; every one has the times of all."""
        self._library.llama_kv_cache_clear(self._context)
        prompts = request["prompts"]
        given = [(token, at, number) for number, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        began, times, chosen = perf_counter(), list[float](), list[list[int]]()
        for start in range(0, len(given), BATCH):
            self._decode(given[start : start + BATCH])
        while True:
            chosen.append(self._tokens())
            times.append(perf_counter() - began)
            if len(chosen) == request["outputs"]:
                break
            place = len(prompts[0]) + len(chosen) - 1
            self._decode([(token, place, number) for number, token in enumerate(chosen[-1])])
        return {
            "answers": [{"marks": [(0, 0.0)], "times": times, "tokens": each} for each in zip(*chosen, strict=True)]
        }

    def close(self) -> None:
        """The end of the process frees it."""

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
        return [int(self._numpy.ctypeslib.as_array(row, shape=(self._vocabulary,)).argmax()) for row in rows]


class OpenVino:
    """OpenVINO GenAI on a GGUF file with a tokenizer, with paged attention."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._numpy, self._openvino = import_module("numpy"), import_module("openvino")
        self._genai = import_module("openvino_genai")
        scheduling = self._genai.SchedulerConfig()
        scheduling.enable_prefix_caching, scheduling.cache_size = False, 1  # GB
        scheduling.max_num_batched_tokens = request["context"]
        options = {"scheduler_config": scheduling, "INFERENCE_NUM_THREADS": request["threads"]}
        self._pipeline = self._genai.LLMPipeline(request["files"], "CPU", **options)
        self.facts = {"version": version("openvino-genai"), "kv_bits": 0}  # it does not say

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer all prompts together. Only the first token's time is told: the others share what is left."""
        ids = self._numpy.array(request["prompts"], dtype="int64")
        asked = self._genai.TokenizedInputs(
            self._openvino.Tensor(ids), self._openvino.Tensor(self._numpy.ones_like(ids))
        )
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = request["outputs"], True, False
        began = perf_counter()
        first = self._pipeline.generate(asked, config).perf_metrics.get_ttft().mean / 1000
        step = (perf_counter() - began - first) / (request["outputs"] - 1)
        times = [first + step * index for index in range(request["outputs"])]
        return {"answers": [{"marks": [(0, 0.0)], "times": times, "tokens": []}] * len(ids)}

    def close(self) -> None:
        """The end of the process frees it."""


ENGINES: dict[str, Callable[[dict[str, Any]], OpenedEngine]] = {
    "ik_llama.cpp": IkLlamaCpp,
    "ik_llama.cpp, flash attention": lambda request: IkLlamaCpp(request, flash_attention=True),
    "OpenVINO GenAI": OpenVino,
}


if __name__ == "__main__":
    serve(ENGINES[sys.argv[1]])
