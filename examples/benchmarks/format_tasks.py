"""Runs public tasks on a model in float32, as exported by default, and in llama.cpp's own formats, paired.

    python -m venv llama && llama/bin/pip install cyllama==0.2.18
    python -m examples.benchmarks.format_tasks MODEL.gguf --name gemma3 --llama-cpp llama/bin/python --work FOLDER \
        --task hellaswag=100 --task calls=20 --title "Public tasks: Gemma 3" -o docs/data/tasks-formats-gemma3.json

All run on the llamacpp target with one thread: the formats are read with their values in float32, so that only these
differ. What the output holds of other tasks stays in it. An interrupted run goes on where it stood.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors.torch import save_file

from edgekit.model.gguf_source import is_gguf
from edgekit.model.source import ModelSource, open_source
from edgekit.quant.source_files import copy_companions
from examples.benchmarks.llama_cpp_formats import FORMATS, INSTALL, floats_and_bytes, quantised_file

NOTES = (
    "One thread of the llamacpp target beside other work, so times say little.",
    "The artifact named balanced is the default recipe, with integers that gptq chose on the default text.",
    "The others are files of llama.cpp's own quantiser, made from the same file without an importance matrix, and run "
    "with their values in float32, as the recipe column says.",
)


def readable(source: ModelSource, file: Path, work: Path) -> Path:
    """The file, or a folder with its floats and the source's tokenizer, which a GGUF written from a folder lacks."""
    if is_gguf(source.weights):
        return file
    folder = work / file.stem
    if not folder.exists():
        floats, _ = floats_and_bytes(source, file)
        part = folder.with_suffix(".part")
        part.mkdir(exist_ok=True)
        copy_companions(source.folder, part)
        shutil.copyfile(source.folder / "config.json", part / "config.json")
        save_file(floats, part / "model.safetensors")
        part.rename(folder)
    return folder


def exported(model: Path, name: str, work: Path, *options: str) -> Path:
    """The model sealed for the llamacpp target; made once and kept in `work`."""
    artifact = work / name
    if not artifact.exists():
        words = [sys.executable, "-m", "edgekit", "export", str(model), "--device", "this", "--target", "llamacpp"]
        sizes = ["--context", "2048", "--sequences", "4", "--threads", "1"]
        subprocess.run([*words, *sizes, *options, "-o", str(artifact)], check=True)
    return artifact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", required=True, help="of the model, in names of artifacts")
    parser.add_argument("--llama-cpp", required=True, metavar="PYTHON", help=f"of a venv with `{INSTALL}`")
    parser.add_argument("--work", type=Path, required=True, help="folder of artifacts and files, which are kept")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--task", action="append", required=True, metavar="NAME[=LIMIT]")
    parser.add_argument("--title", required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    source = open_source(given.model)
    artifacts = [
        exported(given.model, f"{given.name}-float32", given.work, "--recipe", "float32"),
        exported(given.model, f"{given.name}-balanced", given.work),
    ]
    for name in given.formats:
        file = readable(source, quantised_file(source, name, given.llama_cpp, given.work), given.work)
        artifacts.append(exported(file, f"{given.name}-{name}", given.work, "--recipe", "float32"))
    words = [sys.executable, "-m", "examples.benchmarks.task_figures", *map(str, artifacts), "--second-too"]
    for task in given.task:
        words += ["--task", task]
    for note in NOTES:
        words += ["--note", note]
    subprocess.run([*words, "--title", given.title, "-o", str(given.output)], check=True)


if __name__ == "__main__":
    main()
