"""The training script of the demo pair: data, models, and resuming killed runs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file

from edgekit.model.source import open_source
from edgekit.quant import reference_decoder as decoder

pytestmark = pytest.mark.quantize

STEPS, WINDOWS, LENGTH = 40, 8, 64
FUNCTION = '''def {verb}_{noun}({noun}, limit={limit}):
    """Return the {noun} of the list, {verb}ed up to the limit of {limit}."""
    if {noun} is None:
        raise ValueError("no {noun} to {verb}")
    return [each for each in {noun} if each < limit]


'''


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because other tests run at the same time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Python files, each with documented functions of its own."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, noun in enumerate(("apple", "bread", "cloud", "daisy", "eagle", "flint", "grape", "heron", "ivory")):
        functions = [
            FUNCTION.format(verb=verb, noun=noun, limit=10 * number + place)
            for place, verb in enumerate(("filter", "collect", "select", "order", "fold"))
        ]
        (folder / f"{noun}.py").write_text(f'"""Work on {noun}s."""\n\nimport {noun}_lib\n\n\n' + "".join(functions))
    return folder


def options(corpus: Path, out: Path, *more: str, steps: int = STEPS) -> list[str]:
    count = steps * WINDOWS * LENGTH
    fixed = f"--preset tiny --tokens {count} --draft-tokens {count // 2} --device cpu --dtype fp32 --held-out-one-in 4"
    return ["--corpus", str(corpus), "--out", str(out), "--threads", "1", *fixed.split(), *more]


def train(*arguments: str) -> None:
    from examples.training.train_demo import main

    main(list(arguments))


def losses(run: Path, name: str) -> list[float]:
    lines = (run / "checkpoints" / f"{name}.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def unbroken(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "unbroken"
    train(*options(corpus, run))
    return run


def test_the_folders_open_in_edgekit_and_in_transformers_with_the_same_logits(unbroken: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.training.demo_training.llama import read_model

    tokens = torch.arange(7, 107)[None] * 3 % 500
    for name in ("target", "draft"):
        folder = unbroken / name
        source = open_source(folder, need_weights=True)
        assert source.has_weights
        weights = {key: tensor.float() for key, tensor in load_file(folder / "model.safetensors").items()}
        expected = decoder.logits(source.spec, weights.__getitem__, tokens)
        with torch.inference_mode():
            own = read_model(folder)(tokens)
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-4)
        messages = [{"role": "user", "content": "Write `f`."}]
        shown = AutoTokenizer.from_pretrained(folder).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert shown == "<|bos|><|user|>\nWrite `f`.<|end|>\n<|assistant|>\n"


def test_stopped_training_resumes_with_equal_losses(
    corpus: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.training.demo_training.training import Stage

    plain_step = Stage._step

    def stop_at(step: int) -> Callable[..., float]:
        def stepping(stage: Stage, *arguments: Any) -> float:
            if stage.progress.step == step:
                signal.raise_signal(signal.SIGTERM)
            return plain_step(stage, *arguments)

        return stepping

    run = tmp_path / "stopped"
    monkeypatch.setattr(Stage, "_step", stop_at(12))
    train(*options(corpus, run))
    assert "stopped target: step 13" in capsys.readouterr().out
    assert not (run / "target").exists()
    monkeypatch.setattr(Stage, "_step", plain_step)
    train(*options(corpus, run, "--resume"))
    assert "resumed target: step 13" in capsys.readouterr().out
    for name in ("target", "draft"):
        assert losses(run, name) == losses(unbroken, name)
        assert (run / name / "model.safetensors").read_bytes() == (unbroken / name / "model.safetensors").read_bytes()


def test_held_out_files_and_their_copies_are_not_trained_on(corpus: Path, tmp_path: Path) -> None:
    from examples.training.demo_training import tokens
    from examples.training.demo_training.corpus import in_folder

    reserved = (corpus / "eagle.py").read_text()
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"text": reserved}) + "\n")
    copy = tmp_path / "source"
    copy.mkdir()
    for path in corpus.glob("*.py"):
        (copy / path.name).write_text(path.read_text())
    (copy / "almost.py").write_text("# A copy.\n" + reserved)
    settings = tokens.Settings(512, None, 0.0, 4, 0, held_out=str(tmp_path / "held_out.jsonl"))
    tokens.prepare(tmp_path / "data", in_folder(copy), settings)
    import numpy as np

    learned = tokens.read_tokenizer(tmp_path / "data").decode(np.load(tmp_path / "data" / "train.npy").tolist())
    assert "eagle" not in learned
    assert "heron" in learned
