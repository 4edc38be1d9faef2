"""Texts that ExecuTorch's own runner of language models writes, in a separate process.

python tests/helpers/vendors_runner.py ARTIFACT TOKENS PROMPT...
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def greedy_texts(artifact: Path, tokens: int, prompts: Sequence[str]) -> list[str]:
    command = [sys.executable, __file__, str(artifact), str(tokens), *prompts]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    texts: list[str] = json.loads(done.stdout.splitlines()[-1])
    return texts


def main() -> None:
    from edgekit_executorch.operators import register_for_running

    register_for_running()
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    artifact, tokens, *prompts = sys.argv[1:]
    config = GenerationConfig(echo=False, max_new_tokens=int(tokens), temperature=0.0)
    texts = []
    for prompt in prompts:
        runner = TextLLMRunner(f"{artifact}/model.pte", f"{artifact}/tokenizer.json")
        said: list[str] = []
        runner.generate(prompt, config, said.append)
        texts.append("".join(said))
    sys.stdout.write(json.dumps(texts) + "\n")


if __name__ == "__main__":
    main()
