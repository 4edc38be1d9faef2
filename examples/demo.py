"""What edgekit does, on this machine, with the bundled model: plan, export, generate. Run it with `make demo`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

OUT = Path(__file__).parents[1] / "build" / "demo"
PROMPT = "import numpy as np\n\n\ndef test_"
SAMPLING = ("--temperature", "0.6", "--repetition-penalty", "1.15", "--seed", "3")


def run(*arguments: str) -> None:
    shown = " ".join(f"'{each}'" if " " in each or "\n" in each else each for each in arguments)
    print(f"\n$ edgekit {shown}", flush=True)
    subprocess.run([sys.executable, "-m", "edgekit", *arguments], check=True)


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.parent.mkdir(exist_ok=True)
    run("plan", "demo", "--device", "this", "--recipe", "s4-g64")
    run("export", "demo", "--device", "this", "--recipe", "s4-g64", "-o", str(OUT.relative_to(Path.cwd())))
    run("run", str(OUT.relative_to(Path.cwd())), PROMPT, "--max-tokens", "60", *SAMPLING, "--stats")

    print("\nThe same from Python:")
    code = f'''import edgekit

with edgekit.open("{OUT.relative_to(Path.cwd())}") as model:
    for piece in model.stream("class Stack:\\n    def __init__(self):\\n", max_tokens=40, repetition_penalty=1.1):
        print(piece.text, end="", flush=True)
'''
    print("".join(f"    {line}\n" for line in code.splitlines()))
    subprocess.run([sys.executable, "-c", code], check=True)
    print()


if __name__ == "__main__":
    main()
