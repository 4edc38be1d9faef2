"""The option `draft`: each method opens, and a draft that does not fit its target is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_artifacts import install
from runtimes import codec

import edgekit
from edgekit.artifact.artifact import Artifact
from edgekit.cli import command
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.plan import Plan
from edgekit.errors import DoesNotFit, EdgekitError, InvalidInput, Unsupported
from edgekit.model.same_vocabulary import check_same_vocabulary
from edgekit.runtime.speculation.costs import known_costs
from edgekit.runtime.speculation.ngram import LONGEST, TextIndex
from edgekit.testing import FakeEngine, fake_artifact, fake_model, fake_plan

SIZE = codec().vocabulary


@pytest.fixture(autouse=True)
def _fake_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)


def tokenizer(change: Any = None) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(codec().tokenizer.to_str())
    if change:
        change(tree)
    return tree


def made(folder: Path, *, change: Any = None, seed: int = 0, **changed: Any) -> Artifact:
    vocabulary = changed.pop("vocabulary", SIZE)
    plan = fake_plan(fake_model(vocabulary=vocabulary, layers=3, eos_ids=(2,))).model_copy(update=changed)
    return fake_artifact(folder, files={"tokenizer.json": tokenizer(change)}, plan=plan, seed=seed)


@pytest.mark.parametrize("draft", ["ngram", "early-exit", "early-exit:2", "auto", "path", "auto:path"])
def test_every_draft_method_opens_and_keeps_the_text(tmp_path: Path, draft: str) -> None:
    made(tmp_path / "target")
    made(tmp_path / "draft", seed=3, vocabulary=SIZE + 7)
    asked = draft.replace("path", str(tmp_path / "draft"))
    options = {"max_tokens": 60, "temperature": 1.0, "seed": 4}
    with edgekit.open(tmp_path / "target") as runtime:
        plain = runtime.generate("the cat", **options)
        assert runtime.speculation() is None
    with edgekit.open(tmp_path / "target", draft=asked) as runtime:
        drafted = runtime.generate("the cat", **options)
        report = runtime.speculation()
    assert (drafted.tokens, drafted.text) == (plain.tokens, plain.text)
    assert report is not None and report.verify_cost[1] == 1.0 and report.reason
    assert (report.draft_bytes > 0) == ("path" in draft)


@pytest.mark.parametrize("draft", ["nonsense", "auto:nonsense", "ngrams:text"])
def test_invalid_draft_is_refused_before_the_target_is_loaded(tmp_path: Path, draft: str) -> None:
    made(tmp_path / "target")
    opened = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("edgekit.runtime.open.open_file", lambda path, context: opened.append(path))
        with pytest.raises(InvalidInput, match="or ngram, early-exit, head, auto or off"):
            edgekit.open(tmp_path / "target", draft=draft)
    assert not opened


def another_token(tree: dict[str, Any]) -> None:
    vocabulary = tree["model"]["vocab"]
    token = next(token for token, id_ in vocabulary.items() if id_ == 100)
    vocabulary[token + "x"] = vocabulary.pop(token)


def fewer_merges(tree: dict[str, Any]) -> None:
    tree["model"]["merges"].pop()


def other_merge(tree: dict[str, Any]) -> None:
    merges = tree["model"]["merges"]
    merges[3], merges[4] = merges[4], merges[3]


def another_added_token(tree: dict[str, Any]) -> None:
    tree["added_tokens"].append({**tree["added_tokens"][-1], "id": SIZE, "content": "<new>"})


DIFFERENT = {
    "another token": (another_token, "tokens at 100"),
    "fewer merges": (fewer_merges, "merges"),
    "another order of merges": (other_merge, "merges differ at 3"),
    "an added token": (another_added_token, "tokens at"),
}


@pytest.mark.parametrize(("change", "said"), DIFFERENT.values(), ids=DIFFERENT)
def test_draft_with_another_vocabulary_is_refused_with_the_first_difference(
    tmp_path: Path, change: Any, said: str
) -> None:
    made(tmp_path / "target")
    made(tmp_path / "draft", change=change)
    with pytest.raises(InvalidInput, match=said):
        edgekit.open(tmp_path / "target", draft=tmp_path / "draft")


def test_vocabularies_are_compared_by_content_not_by_file(tmp_path: Path) -> None:
    for name, indent in (("one", None), ("other", 3)):
        tree = tokenizer()
        if name == "other":
            tree["model"]["merges"] = [" ".join(merge) for merge in tree["model"]["merges"]]
            tree["normalizer"] = {"type": "NFC"}
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tree, indent=indent))
    check_same_vocabulary(tmp_path / "one", tmp_path / "other")


BAD_TOKENIZERS = {
    "no JSON": "{",
    "no model": "{}",
    "a list": "[]",
    "ids that are no numbers": '{"model": {"vocab": {"a": "b"}}}',
    "pieces that are numbers": '{"model": {"vocab": [1, 2]}}',
    "added tokens that are no objects": '{"model": {"vocab": {}}, "added_tokens": [1]}',
}


@pytest.mark.parametrize("text", BAD_TOKENIZERS.values(), ids=BAD_TOKENIZERS)
def test_damaged_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    for name, content in (("one", json.dumps(tokenizer())), ("other", text)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidInput):
        check_same_vocabulary(tmp_path / "one", tmp_path / "other")


def refusals(tmp_path: Path) -> dict[str, tuple[Any, type[EdgekitError], str]]:
    made(tmp_path / "small", storage=KVCacheConfig(capacity_tokens=64, kv_bits=16), context=64)
    made(tmp_path / "fits")
    return {
        "a path that is not there": (tmp_path / "missing", InvalidInput, "there is no artifact at"),
        "a name that is none": ("n-gram", InvalidInput, "there is no artifact at"),
        "a draft that holds less": (tmp_path / "small", InvalidInput, "its context has 64 tokens, the target's 512"),
        "an exit that is none": ("early-exit:9", InvalidInput, "no exit after layer '9'; this artifact has 1, 2"),
        "an exit that is no number": ("early-exit:first", InvalidInput, "no exit"),
        "prompt lookup in a file": ("ngram:text", InvalidInput, "prompt lookup has no argument"),
    }


@pytest.mark.parametrize("case", range(6))
def test_artifacts_that_cannot_draft_are_refused_with_the_reason(tmp_path: Path, case: int) -> None:
    made(tmp_path / "target")
    draft, kind, said = list(refusals(tmp_path).values())[case]
    with pytest.raises(kind, match=said):
        edgekit.open(tmp_path / "target", draft=draft)


def test_draft_that_does_not_fit_is_refused_with_both_sizes(tmp_path: Path) -> None:
    made(tmp_path / "draft")
    tight = fake_plan(fake_model(vocabulary=SIZE, layers=3)).estimate.private_bytes + 10
    made(tmp_path / "target", budget_bytes=tight)
    with pytest.raises(DoesNotFit, match="its plan allows"):
        edgekit.open(tmp_path / "target", draft=tmp_path / "draft")


def test_missing_engine_abilities_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "target")
    made(tmp_path / "draft")
    made(tmp_path / "shallow", vocabulary=SIZE)

    def opening(**options: Any) -> Any:
        return lambda self, plan, files, exact=False: FakeEngine(vocabulary=SIZE, layers=1, **options)

    monkeypatch.setattr("edgekit.testing.target.FakeTarget.open", opening(max_rewind=0))
    with pytest.raises(Unsupported, match="cannot take tokens back"):
        edgekit.open(tmp_path / "target", draft="ngram")
    monkeypatch.setattr("edgekit.testing.target.FakeTarget.open", opening())
    with pytest.raises(Unsupported, match="no exits"):
        edgekit.open(tmp_path / "target", draft="early-exit")
    made(tmp_path / "other")

    def by_place(self: Any, plan: Plan, files: Path, exact: bool = False) -> Any:
        return FakeEngine(vocabulary=SIZE, can_evict=files.name != "draft")

    monkeypatch.setattr("edgekit.testing.target.FakeTarget.open", by_place)
    with pytest.raises(Unsupported, match="cannot evict"):
        edgekit.open(tmp_path / "target", window=64, sinks=2, draft=tmp_path / "draft")


def test_costs_are_measured_once_and_a_damaged_fact_is_measured_again(tmp_path: Path) -> None:
    calls = []

    class Counting(FakeEngine):
        def forward(self, chunks):
            calls.append(len(chunks[0].tokens))
            return super().forward(chunks)

    storage = KVCacheConfig(capacity_tokens=128, kv_bits=16)
    first = known_costs(Counting(), storage, "a" * 64)
    count = len(calls)
    assert {1, 2, 3, 4, 8, 16} <= set(calls)
    assert known_costs(Counting(), storage, "a" * 64).ratios() == first.ratios() and len(calls) == count
    (fact,) = (tmp_path / "home").rglob("forward-cost.json")
    fact.write_text('{"seconds": {"1": -1.0}}')
    known_costs(Counting(), storage, "a" * 64)
    assert len(calls) > count
    engine = Counting(max_rewind=4)
    known_costs(engine, storage, None)
    assert engine.states == []


def test_command_line_drafts_and_reports_the_gain(tmp_path: Path) -> None:
    made(tmp_path / "target")
    made(tmp_path / "draft", seed=0)
    arguments = ["run", str(tmp_path / "target"), "the cat", "--raw", "--max-tokens", "50", "--json"]
    plain = json.loads(CliRunner().invoke(command, arguments).stdout)
    found = CliRunner().invoke(command, [*arguments, "--draft", str(tmp_path / "draft")])
    drafted = json.loads(found.stdout)
    assert drafted["text"] == plain["text"]
    told = drafted["statistics"]["speculation"]
    assert told["proposals"][0]["name"] == "model" and told["draft_bytes"] > 0
    grown = drafted["statistics"]["predicted_total_bytes"] - plain["statistics"]["predicted_total_bytes"]
    assert grown == told["draft_bytes"]
    shown = CliRunner().invoke(command, [*arguments[:-1], "--draft", "auto", "--stats"])
    assert "drafting  o" in shown.stderr and "speed-up estimated" in shown.stderr
    refused = CliRunner().invoke(command, [*arguments, "--draft", "early-exit:7"], standalone_mode=False)
    assert isinstance(refused.exception, InvalidInput)


def test_text_index_finds_the_longest_earlier_match() -> None:
    index = TextIndex()
    index.extend([1, 2, 3, 4, 5, 9, 2, 3, 4, 7, 8, 3, 4])
    assert index.find(3) == ([7, 8, 3], 2)
    index.extend([5, 9, 9, 9])
    assert index.find(2)[1] == 2
    other = TextIndex()
    other.extend([1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4])
    assert other.find(4) == ([5, 6, 0, 1], LONGEST)
    round_ = TextIndex()
    round_.extend([5, 6] * 5)
    assert round_.find(5) == ([5, 6, 5, 6, 5], LONGEST)
    assert TextIndex().find(5) == ([], 0)


def test_text_index_drops_its_oldest_tokens() -> None:
    index = TextIndex(kept_tokens=100)
    index.extend([1, 2, 3, 4, 5])
    index.extend([token % 1000 + 10 for token in range(5000)])
    assert len(index) == 5005
    assert len(index._text) <= 200 and all(len(places) <= 200 for places in index._places.values())
    index.extend([1, 2, 3, 4])
    assert index.find(1) == ([], 0)  # forgotten
    newest = [token % 1000 + 10 for token in range(4990, 4994)]
    index.extend(newest)
    assert index.find(1)[1] == LONGEST


def test_draft_follows_the_window_of_its_target(tmp_path: Path) -> None:
    made(tmp_path / "target")
    made(tmp_path / "draft")
    with edgekit.open(tmp_path / "target", window=40, sinks=4) as runtime:
        plain = runtime.generate("the cat", max_tokens=200)
    with edgekit.open(tmp_path / "target", window=40, sinks=4, draft=tmp_path / "draft") as runtime:
        assert runtime.policy == KVEvictionPolicy.of(40, 4)
        assert runtime.generate("the cat", max_tokens=200).tokens == plain.tokens
        assert runtime.metrics().accepted == runtime.metrics().proposed or runtime.metrics().proposed == 0
