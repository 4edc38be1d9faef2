"""The runtime with a real engine: the bundled model gives sensible answers, and exact mode is exact."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("torch")

import edgekit
from edgekit.artifact.export import export
from edgekit.contracts.engine import Chunk
from edgekit.planner.make import make_plans
from edgekit.runtime.speculation.drafters import Drafting
from edgekit.testing.drafting import ReplayDrafter

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]

PROMPTS = ["def add(a, b):\n", "import os\n", "class Stack:\n    def", "for i in range(", "# The quick"]
SAMPLED = {"max_tokens": 80, "temperature": 0.7, "seed": 5}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(folder / "home"))
        made = make_plans("demo", ["this-cpu"])
        export(made[0], folder / "artifact")
        yield folder / "artifact"


def test_greedy_text_equals_the_bare_engines(artifact: Path) -> None:
    with edgekit.open(artifact) as runtime:
        prompt = runtime.encode(PROMPTS[0])
        answer = runtime.complete(prompt, max_tokens=60, ignore_eos=True)
        state, chosen, feed = runtime.engine.start(runtime.kv_config), list[int](), prompt
        for _ in range(60):
            chosen.append(int(runtime.engine.forward([Chunk(state, feed, 1)])[0][-1].argmax()))
            feed = chosen[-1:]
    assert list(answer.tokens) == chosen


def test_exact_texts_do_not_depend_on_batches_and_drafts(artifact: Path) -> None:
    with edgekit.open(artifact, exact=True) as runtime:
        plain = [runtime.generate(prompt, **SAMPLED) for prompt in PROMPTS]
        whole = [[*runtime.encode(prompt), *answer.tokens] for prompt, answer in zip(PROMPTS, plain, strict=True)]
        together = [runtime.submit(prompt, **SAMPLED) for prompt in PROMPTS]
        assert [stream.answer().tokens for stream in together] == [answer.tokens for answer in plain]
    for wrong_every in (0, 3):
        for prompt, answer, text in zip(PROMPTS, plain, whole, strict=True):
            drafting = Drafting(lambda _: ReplayDrafter(text, wrong_every=wrong_every, wrong_token=7), 4)  # noqa: B023
            with edgekit.open(artifact, exact=True, drafting=drafting) as drafted:
                assert drafted.generate(prompt, **SAMPLED).tokens == answer.tokens
                assert drafted.metrics().accepted > 10


@pytest.mark.parametrize("window", [None, 160], ids=["full", "window"])
def test_exact_answers_do_not_depend_on_reuse_and_batches(artifact: Path, window: int | None) -> None:
    opening = {"exact": True, "window": window, "sinks": 4 if window else 0}
    texts = [*PROMPTS, *PROMPTS, PROMPTS[2] + " push(self, item):\n" * 12]
    with edgekit.open(artifact, prefixes=0, **opening) as runtime:
        alone = [runtime.generate(text, **SAMPLED).tokens for text in texts]
        assert runtime.metrics().prefix_hits == 0
    with edgekit.open(artifact, prefixes="64MiB", sequences=4, **opening) as runtime:
        streams = [runtime.submit(text, **SAMPLED) for text in texts]
        assert [stream.answer().tokens for stream in streams] == alone
        assert runtime.metrics().prefix_hits >= len(PROMPTS) - 1
        longer = [[*runtime.encode(text), *answer[:-9]] for text, answer in zip(texts, alone, strict=True)]
        for tokens, answer in zip(longer, alone, strict=True):
            wanted = {**SAMPLED, "max_tokens": min(9, len(answer))}
            assert runtime.complete(tokens, **wanted).tokens == answer[-9:]


def test_prefixes_of_a_real_model_survive_a_restart(artifact: Path, tmp_path: Path) -> None:
    prompt = PROMPTS[2] + " push(self, item):\n" * 12
    with edgekit.open(artifact, exact=True, prefixes="64MiB") as runtime:
        expected = runtime.generate(prompt, **SAMPLED).tokens
        written = runtime.save_prefixes(tmp_path / "prefixes")
    with edgekit.open(artifact, exact=True, prefixes="64MiB") as runtime:
        assert runtime.load_prefixes(tmp_path / "prefixes") == written > 0
        assert runtime.generate(prompt, **SAMPLED).tokens == expected
        assert runtime.metrics().cached_tokens == len(runtime.encode(prompt)) - 1


def test_window_with_sinks_does_not_grow(artifact: Path) -> None:
    with edgekit.open(artifact, window=96, sinks=4) as runtime:
        answer = runtime.generate(PROMPTS[0], max_tokens=600, ignore_eos=True)
        assert len(answer.tokens) == 600 and runtime.metrics().evictions > 40
        again = runtime.generate(PROMPTS[0], max_tokens=600, ignore_eos=True)
        assert again.tokens == answer.tokens


def test_a_schema_holds_with_a_real_model(artifact: Path) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    with edgekit.open(artifact) as runtime:
        for seed in range(3):
            answer = runtime.chat([{"role": "user", "content": "Answer."}], schema=schema, temperature=1.0, seed=seed)
            assert json.loads(answer.text) in ({"ok": True}, {"ok": False})


def test_the_model_writes_python(artifact: Path) -> None:
    with edgekit.open(artifact) as runtime:
        answer = runtime.generate("import numpy as np\n", max_tokens=30, stop=["\n\n", "\ndef", "\nclass"])
    lines = ("import numpy as np\n" + answer.text).splitlines()
    ast.parse("\n".join(lines[:-1]))
