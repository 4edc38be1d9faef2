"""The smoke test of a bundle: every token is compared, ties are not taken for evidence, and wrong weights fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner

from edgekit.apps.handover.reference import NEW_TOKENS, tensor_of
from edgekit.cli import command
from edgekit.contracts.neutral import NeutralWeights
from edgekit.model.tokenizer_file import read_tokenizer
from edgekit.quant import reference_decoder

pytestmark = pytest.mark.quantize
SURE, TIE = 3.0, 0.1  # nats of the best token over the second

Answer = Callable[[list[int], int], dict[str, Any]]


def choice(text: str, logprobs: list[float | None] | None = None) -> dict[str, Any]:
    return {"text": text, "logprobs": None if logprobs is None else {"token_logprobs": logprobs}}


def smoke_test(script: Path, reference: Path, answer: Answer) -> tuple[int, str]:
    """Run the script against a server that gives these answers; return its exit code and what it wrote."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert asked["temperature"] == 0 and self.path == "/v1/completions"
            body = json.dumps({"choices": [answer(asked["prompt"], asked["max_tokens"])]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        asked = [sys.executable, "-I", str(script), "--url", url, "--reference", str(reference)]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=120)
        server.shutdown()
    assert done.stderr == ""
    return done.returncode, done.stdout


class Written(NamedTuple):
    """A reference of one prompt and four tokens, of which each is a letter."""

    script: Path
    reference: Path

    def test(self, answer: Answer) -> tuple[int, str]:
        return smoke_test(self.script, self.reference, answer)


LETTERS = "abcd"


def written(folder: Path, margins: tuple[float, ...]) -> Written:
    from edgekit.apps.handover import smoke_test as script

    steps = [
        {"token": 10 + place, "text": LETTERS[: place + 1], "log_probability": -0.5, "margin": margin}
        for place, margin in enumerate(margins)
    ]
    answers = [{"prompt": "x", "prompt_tokens": [1, 2], "steps": steps}]
    reference = {"model": "m", "tie": 0.25, "mean_difference": 0.05, "answers": answers}
    (folder / "reference.json").write_text(json.dumps(reference))
    return Written(Path(script.__file__), folder / "reference.json")


def ours(prompt: list[int], count: int) -> dict[str, Any]:
    place = len(prompt) - 2
    return choice(LETTERS[place : place + count], [-0.5] * count)


def test_our_answers_pass(tmp_path: Path) -> None:
    code, told = written(tmp_path, (SURE,) * 4).test(ours)
    assert code == 0 and "ok   'x': 4 of 4 tokens equal, log probabilities within 0.000" in told
    assert "4 tokens equal, 0 ties, log probabilities 0.0000 apart on average (allowed 0.05)" in told


def test_after_a_tie_the_server_goes_on_from_our_text(tmp_path: Path) -> None:
    asked = []

    def at_a_tie(prompt: list[int], count: int) -> dict[str, Any]:
        asked.append((prompt, count))
        return choice("ayy!", [-0.5] * 4) if len(prompt) == 2 else ours(prompt, count)

    code, told = written(tmp_path, (SURE, TIE, SURE, SURE)).test(at_a_tie)
    assert code == 0 and "3 of 4 tokens equal, ties of 0.100 nats" in told
    assert asked == [([1, 2], 4), ([1, 2, 10, 11], 2)]


@pytest.mark.parametrize(
    ("text", "place"), [("abyy", 3), ("y", 1), ("abc", 4), ("abcdy", 4), ("", 1)]
)  # fmt: skip
def test_another_token_than_a_sure_one_fails(tmp_path: Path, text: str, place: int) -> None:
    code, told = written(tmp_path, (SURE,) * 4).test(lambda *_: choice(text))
    assert code == 1 and f"FAIL 'x': token {place} is 3.00 nats ahead" in told and f"goes on with {text!r}" in told


def test_a_sure_token_after_a_tie_is_compared_too(tmp_path: Path) -> None:
    code, told = written(tmp_path, (TIE, SURE, SURE, SURE)).test(lambda *_: choice("yyyy"))
    assert code == 1 and "token 2 is 3.00 nats ahead: expected 'ab'" in told


def test_ties_alone_are_no_evidence(tmp_path: Path) -> None:
    code, told = written(tmp_path, (TIE,) * 4).test(lambda *_: choice("yyyy"))
    assert code == 1 and "nearly every token is a tie" in told and "ties of 0.100, 0.100, 0.100, 0.100" in told


def test_other_log_probabilities_fail_with_equal_tokens(tmp_path: Path) -> None:
    one = written(tmp_path, (SURE,) * 4)
    code, told = one.test(lambda prompt, count: choice("abcd", [-0.5, -0.6, None, -0.52]))
    assert code == 0 and "within 0.100" in told and "0.0400 apart" in told
    code, told = one.test(lambda prompt, count: choice("abcd", [-0.5, -0.8, -0.5, -0.5]))
    assert code == 1 and "0.0750 apart on average (allowed 0.05): the weights, or the arithmetic, are others" in told


@pytest.mark.parametrize("body", [{}, {"text": None}, {"text": 3}])
def test_an_answer_of_another_form_fails_in_one_line(tmp_path: Path, body: dict[str, Any]) -> None:
    code, told = written(tmp_path, (SURE,) * 4).test(lambda *_: body)
    assert code == 1 and told.count("\n") == 2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("handover") / "demo"
    asked = ["handover", "demo", "--to", "vllm", "--gpu", "L4", "--effort", "quick", "-r", "s4-g32", "-o", str(place)]
    made = CliRunner().invoke(command, asked)
    assert made.exit_code == 0, made.output
    return place


def served(weights: Path) -> Answer:
    """A server that computes in float32 with the weights of a folder."""
    opened = NeutralWeights.open(weights)
    tensor, model = partial(tensor_of, opened), opened.model
    tokenizer = read_tokenizer(weights / "tokenizer.json")

    def answer(prompt: list[int], count: int) -> dict[str, Any]:
        tokens, logprobs = list(prompt), list[float | None]()
        for _ in range(count):
            best = reference_decoder.logits(model, tensor, torch.tensor([tokens]))[0, -1].log_softmax(-1)
            logprobs.append(float(best.max()))
            tokens.append(int(best.argmax()))
            if tokens[-1] in model.eos_ids:
                break
        return choice(tokenizer.decode(tokens)[len(tokenizer.decode(prompt)) :], logprobs)

    return answer


def with_swapped_layers(weights: Path, copy: Path) -> Path:
    """Copy weights, so that each of two layers has the other's tensors."""
    shutil.copytree(weights, copy)
    index = copy / "model.safetensors.index.json"
    index.write_bytes(swapped(index.read_bytes()))
    for path in copy.glob("*.safetensors"):
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes(data[:8] + swapped(data[8:end]) + data[end:])
    return copy


def swapped(names: bytes) -> bytes:
    for old, new in ((b"layers.1.", b"layers.#."), (b"layers.2.", b"layers.1."), (b"layers.#.", b"layers.2.")):
        names = names.replace(old, new)
    return names


def test_the_weights_of_the_bundle_pass_and_swapped_layers_fail(bundle: Path, tmp_path: Path) -> None:
    script, reference = bundle / "smoke_test.py", bundle / "reference.json"
    expected = json.loads(reference.read_text())
    assert all(len(answer["steps"]) == NEW_TOKENS for answer in expected["answers"])
    code, told = smoke_test(script, reference, served(bundle / "weights"))
    assert code == 0 and told.count("16 of 16 tokens equal, log probabilities within 0.000") == 3, told
    code, told = smoke_test(script, reference, served(with_swapped_layers(bundle / "weights", tmp_path / "swapped")))
    assert code == 1 and "nats ahead" in told, told
