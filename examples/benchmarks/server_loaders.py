"""Opens bundles of `edgekit handover` in vLLM on a processor, and compares its predictions with our reference.

    python -m examples.benchmarks.server_loaders experts FOLDER [--family mixtral]   a small random mixture of experts
    python -m examples.benchmarks.server_loaders reference BUNDLE ...   with edgekit: what each bundle should say
    python -m examples.benchmarks.server_loaders disturbed BUNDLE ...   with edgekit: the reference against itself
    VLLM_PYTHON examples/benchmarks/server_loaders.py open BUNDLE ...   in an environment that has vLLM, not edgekit

The reference reads the bytes that are served and computes in float32; it rounds inputs of linears where the config
says that the server does. `disturbed` rounds the inputs of linears otherwise: as close as servers can be expected to
come. `open` starts a process for each bundle and arithmetic, because vLLM keeps what it took, and
prints a line for each: the kernels that vLLM chose, the mean KL divergence from the reference, the share of equal top
tokens, and the largest difference of any log probability. A bundle that vLLM refuses is a line as well, with its error.
For processors vLLM has builds of its own; `open` asks for nothing but such a build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from edgekit.apps.handover.server_plan import ServerPlan

    Observe = Callable[[str, torch.Tensor], None]

HELD_OUT = Path(__file__).parent / "held_out"
WINDOWS, WINDOW = 4, 96  # of each kind of text
REFERENCE = "held_out.npz"
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
SMALL = {"gpu_memory_utilization": 0.1}  # of the memory of the processor, whatever its name
CHOSEN = re.compile(r"(?:Using|Selected) '?(\w*(?:Kernel|CPU|Experts)\w*)'?")


def write_experts(folder: Path, family: str) -> None:
    """Write a random mixture of experts, with weights so large that tokens differ, and the demo's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from edgekit.model.source import open_source

    demo = open_source("demo")
    config = {
        "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": demo.spec.vocab_size, "num_experts_per_tok": 2,
        "max_position_embeddings": 512, "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 0,
    }  # fmt: skip
    own = {"mixtral": {"num_local_experts": 8}, "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 128}}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config, **own[family]), dtype=torch.float32)
    model.to(torch.float16).save_pretrained(folder)
    for path in demo.tokenizer_files:
        shutil.copy(path, folder)


def write_reference(bundle: Path) -> None:
    """Store the log probabilities after every token of held-out text, by the bytes of the bundle."""
    import torch

    from edgekit.apps.handover.server_plan import ServerPlan
    from edgekit.model.tokenizer_file import read_tokenizer
    from edgekit.quant import reference_decoder

    plan = ServerPlan.model_validate_json((bundle / "plan.json").read_bytes())
    tokenizer = read_tokenizer(bundle / "weights" / "tokenizer.json")
    ids = [tokenizer.encode(text.read_text()).ids[: WINDOWS * WINDOW] for text in sorted(HELD_OUT.glob("*.txt"))]
    windows = torch.tensor(ids).reshape(-1, WINDOW)
    served = Served(bundle / "weights", plan)
    logits = reference_decoder.logits(plan.model, served.tensor, windows, observe=served.round_inputs)
    np.savez(bundle / REFERENCE, windows=windows.numpy(), log_p=logits.log_softmax(-1).numpy())
    print(bundle)


class Served:
    """The tensors of a bundle, read by the names and types under which they are stored."""

    def __init__(self, weights: Path, plan: ServerPlan) -> None:
        from edgekit.formats.safetensors import TensorFolder

        self._model, self._shapes = plan.model, {each.name: each.shape for each in plan.model.tensors()}
        self._tensors = TensorFolder.open(weights)

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        from edgekit.contracts.neutral import on_disk
        from edgekit.formats.int_packing import unpack

        stored = on_disk(self._model, name)
        if f"{stored}_packed" in self._tensors.entries:
            rows, inputs = self._shapes[name]
            packed = self._tensors.array(f"{stored}_packed").view(np.uint8).reshape(rows, -1)
            values = unpack(packed, packed.shape[1] * 8 // inputs, inputs).astype(np.float32)
        elif self._tensors.entry(stored).dtype == "F8_E4M3":
            values = torch.from_numpy(np.array(self._tensors.array(stored))).view(torch.float8_e4m3fn).float().numpy()
        elif self._tensors.entry(stored).dtype == "I8":
            values = self._tensors.array(stored).astype(np.float32)
        else:
            return torch.from_numpy(np.array(self._tensors.floats(stored)))
        scales = self._tensors.floats(f"{stored}_scale")
        return torch.from_numpy((values.reshape(*scales.shape, -1) * scales[:, :, None]).reshape(values.shape))

    def round_inputs(self, module: str, inputs: torch.Tensor) -> None:
        """Round the inputs of a linear as the server does, by the type of its weights."""
        from edgekit.apps.handover.fp8 import round_activations
        from edgekit.apps.handover.int8_inputs import round_inputs
        from edgekit.contracts.neutral import on_disk

        entry = self._tensors.entries.get(on_disk(self._model, f"{module}.weight"))
        if entry is not None and entry.dtype == "F8_E4M3":
            round_activations(module, inputs)
        elif entry is not None and entry.dtype == "I8":
            round_inputs(inputs)


def compare_disturbed(bundle: Path) -> Iterator[dict[str, Any]]:
    """Compare the reference with itself, the inputs of linears rounded otherwise."""
    import torch

    from edgekit.apps.handover.int8_inputs import round_inputs
    from edgekit.apps.handover.server_plan import ServerPlan
    from edgekit.quant import reference_decoder

    plan = ServerPlan.model_validate_json((bundle / "plan.json").read_bytes())
    stored, served = np.load(bundle / REFERENCE), Served(bundle / "weights", plan)

    def first_to(dtype: torch.dtype, then: Observe) -> Observe:
        def observe(module: str, inputs: torch.Tensor) -> None:
            inputs.copy_(inputs.to(dtype).float())
            then(module, inputs)

        return observe

    forms: dict[str, Observe] = {
        "16 bits and no more": first_to(torch.float16, reference_decoder.ignore),
        "first to float16": first_to(torch.float16, served.round_inputs),
        "first to bfloat16": first_to(torch.bfloat16, served.round_inputs),
        "all to 8 bits": first_to(torch.bfloat16, lambda _, inputs: round_inputs(inputs)),
    }
    for name, observe in forms.items():
        logits = reference_decoder.logits(plan.model, served.tensor, torch.tensor(stored["windows"]), observe=observe)
        yield {"inputs": name, **distance(stored["log_p"][:, :-1], logits.log_softmax(-1).numpy()[:, :-1])}


def distance(exact: np.ndarray, heard: np.ndarray) -> dict[str, Any]:
    """Return how far log probabilities lie from those of the reference."""
    exact, heard = exact.astype(np.float64), heard.astype(np.float64)
    return {
        "tokens": int(exact.shape[0] * exact.shape[1]),
        "mean_kl": float((np.exp(exact) * (exact - heard)).sum(-1).mean()),
        "same_top": float((exact.argmax(-1) == heard.argmax(-1)).mean()),
        "largest_difference": float(np.abs(exact - heard).max()),
    }


def open_in_turn(bundle: Path, dtype: str) -> dict[str, Any]:
    """Open a bundle in a process of its own: what it found, or vLLM's error."""
    command = [sys.executable, __file__, "one", str(bundle), "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | SETTINGS, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    kernels = sorted(set(CHOSEN.findall(done.stdout + done.stderr)))
    if said:
        return {"kernels": kernels, **json.loads(said[-1])}
    errors = re.findall(r"^(?:\S* )?(\w+Error: .*(?:\n.*cannot implement.*)*)", done.stdout + done.stderr, re.MULTILINE)
    return {"kernels": kernels, "refused": errors[0] if errors else f"exit {done.returncode}"}


def open_one(bundle: Path, dtype: str) -> dict[str, Any]:
    """Compare vLLM's predictions after every token of the windows with the reference."""
    import vllm

    stored = np.load(bundle / REFERENCE)
    windows, exact = stored["windows"], stored["log_p"][:, :-1]
    llm = vllm.LLM(
        str(bundle / "weights"), dtype=dtype, enforce_eager=True, max_model_len=2 * WINDOW, max_logprobs=-1, **SMALL
    )
    asked = vllm.SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
    )  # of every token of the vocabulary
    heard = np.empty_like(exact)
    for place, window in enumerate(windows):
        (answer,) = llm.generate([{"prompt_token_ids": window.tolist()}], asked, use_tqdm=False)
        told = answer.prompt_logprobs
        for position in range(1, WINDOW):
            part = slice(told.start_indices[position], told.end_indices[position])
            heard[place, position - 1, told.token_ids[part]] = told.logprobs[part]
    return {"loader": f"vllm {vllm.__version__}", **distance(exact, heard)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["experts", "reference", "disturbed", "open", "one"])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--family", default="qwen3_moe", choices=["qwen3_moe", "mixtral"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float16"])
    given = parser.parse_args()
    for folder in given.folders:
        if given.step == "experts":
            write_experts(folder, given.family)
        elif given.step == "reference":
            write_reference(folder)
        elif given.step == "disturbed":
            for row in compare_disturbed(folder):
                print(json.dumps({"bundle": folder.name, **row}), flush=True)
        elif given.step == "one":
            print(json.dumps(open_one(folder, given.dtype[0])))
        else:
            for dtype in given.dtype:
                line = {"bundle": folder.name, "dtype": dtype, **open_in_turn(folder, dtype)}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
