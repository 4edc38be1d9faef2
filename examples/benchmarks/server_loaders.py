"""Opens neutral weights in vLLM on a CPU, and compares its predictions with those of the same integers in float32.

    python -m examples.benchmarks.server_loaders write DIR   with edgekit: one folder a recipe, and what each should say
    VLLM_PYTHON examples/benchmarks/server_loaders.py open DIR   in an environment that has vLLM, and needs no edgekit

`open` starts a process for each folder and arithmetic, because vLLM keeps what it took, and prints a line for each:
the mean KL divergence from the float32 reference, the share of equal top tokens, and the largest difference of any
log-probability. A folder that vLLM refuses is a line as well, with its first error. Linears named behind a `+` are
stored in 8 bits; the reference of `fp8` rounds activations too. For processors vLLM has builds of its own; `open` asks
for nothing but such a build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

RECIPES = ("s4-g32", "s4-g64", "s4-g128", "s8", "s4-g32+o_proj+down_proj", "s4-g32+v_proj", "float16", "fp8")
DTYPES = ("bfloat16", "float16", "float32")
WINDOWS, WINDOW = 8, 96
REFERENCE = "reference.npz"
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
SMALL = {"gpu_memory_utilization": 0.1}  # of the memory of the processor, whatever its name


def write(folder: Path, model: str, recipes: Sequence[str]) -> None:
    """A folder for each recipe, with embedding and head in float and as they are, and the logits of its integers."""
    import torch
    from tokenizers import Tokenizer

    import edgekit
    from edgekit.common.content_store import ContentStore
    from edgekit.contracts.recipe import Format, Rule, named_recipe
    from edgekit.handover.bundle import NeutralReader
    from edgekit.model.source import open_source
    from edgekit.quant import reference_decoder as decoder
    from edgekit.quant.fp8 import round_activations, write_fp8
    from edgekit.quant.pipeline import neutral_weights, no_progress
    from edgekit.quant.vllm_compat import handover

    folder.mkdir(parents=True)
    source = open_source(model, need_weights=True)
    tokenizer = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
    held_out = Path(edgekit.__file__).parent / "_demo" / "held_out.jsonl"
    ids: list[int] = []
    for line in held_out.read_text().splitlines():
        ids += tokenizer.encode(json.loads(line)["text"]).ids
    windows = torch.tensor(ids[: WINDOWS * WINDOW]).reshape(WINDOWS, WINDOW)
    for name in recipes:
        recipe = named_recipe(name.partition("+")[0])
        climbing = tuple(Rule(pattern=f"*.{part}", format=Format(kind="s8")) for part in name.split("+")[1:])
        recipe = recipe.model_copy(update={"name": name, "rules": climbing + recipe.rules})
        for kind, chosen in (("handover", handover(recipe)), ("whole", recipe)):
            place = folder / f"{name}.{kind}"
            if recipe.is_fp8() and kind == "whole":
                continue  # is for servers alone
            if recipe.is_fp8():
                get_tensor = write_fp8(source, chosen, place, no_progress).tensor
            else:
                weights = neutral_weights(source, chosen, store=ContentStore(folder / "store"))
                shutil.copytree(weights.folder, place)
                get_tensor = NeutralReader(weights).tensor
            observe = round_activations if recipe.is_fp8() else decoder.ignore
            logits = decoder.logits(source.spec, get_tensor, windows, observe=observe)
            np.savez(place / REFERENCE, windows=windows.numpy(), log_p=logits.log_softmax(-1).numpy())
            print(place)


def open_all(folder: Path) -> None:
    """A line for each folder and arithmetic."""
    for place in sorted(path.parent for path in folder.glob(f"*/{REFERENCE}")):
        for dtype in DTYPES:
            command = [sys.executable, __file__, "one", str(place), "--dtype", dtype]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | SETTINGS, check=False)
            said = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if said:
                print(json.dumps({"folder": place.name, "dtype": dtype, **json.loads(said[-1])}), flush=True)
            else:
                errors = [
                    line
                    for line in (done.stdout + done.stderr).splitlines()
                    if re.search(r"(^|\s)\w+Error(: |$)", line)
                ]
                refused = errors[0].partition(") ")[2] or errors[0] if errors else f"exit {done.returncode}"
                print(json.dumps({"folder": place.name, "dtype": dtype, "refused": refused[:200]}), flush=True)


def open_one(place: Path, dtype: str) -> dict[str, Any]:
    """Compare vLLM's predictions after every token of the windows with the reference."""
    import vllm

    stored = np.load(place / REFERENCE)
    windows, exact = stored["windows"], stored["log_p"].astype(np.float64)
    llm = vllm.LLM(str(place), dtype=dtype, enforce_eager=True, max_model_len=2 * WINDOW, max_logprobs=-1, **SMALL)
    asked = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    heard = np.empty((len(windows), WINDOW - 1, exact.shape[-1]))
    for place_of, window in enumerate(windows):  # an answer holds an object for each token of the vocabulary
        (answer,) = llm.generate([{"prompt_token_ids": window.tolist()}], asked, use_tqdm=False)
        for position, row in enumerate(answer.prompt_logprobs[1:]):
            heard[place_of, position, list(row)] = [one.logprob for one in row.values()]
    exact = exact[:, :-1]
    return {
        "loader": f"vllm {vllm.__version__}",
        "mean_kl": float((np.exp(exact) * (exact - heard)).sum(-1).mean()),
        "same_top": float((exact.argmax(-1) == heard.argmax(-1)).mean()),
        "largest_difference": float(np.abs(exact - heard).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["write", "open", "one"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    given = parser.parse_args()
    if given.step == "write":
        write(given.folder, given.model, given.recipes)
    elif given.step == "open":
        open_all(given.folder)
    else:
        print(json.dumps(open_one(given.folder, given.dtype)))


if __name__ == "__main__":
    main()
