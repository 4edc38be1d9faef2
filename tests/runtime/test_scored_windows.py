"""Windows that keep tokens by scores: the options of plans, openings and requests, the bytes and the refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import shapes
from edgekit_onnx.memory import memory_terms
from fake_artifacts import install, make_artifact

import edgekit
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.memory import total
from edgekit.device.load import load_profile
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported
from edgekit.planner.candidates import PlanSubject
from edgekit.planner.make import targets_for
from edgekit.planner.memory import explain, load_of
from edgekit.planner.request import PlanRequest
from edgekit.planner.resolver import resolve
from edgekit.plugins import load_target
from edgekit.runtime.open import predict_opening

SUBJECT = PlanSubject(shapes.spec_of(shapes.LLAMA_32_1B, "LLAMA_32_1B"), "LLAMA_32_1B", "0" * 64)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_artifact(tmp_path_factory.mktemp("scored") / "fake.edgekit")


def test_the_span_with_the_lowest_scores_is_dropped() -> None:
    policy = KVEvictionPolicy.of(64, 4, "valuediff")
    assert policy.least([1.0] * 8 + [0.0] * 8 + [1.0] * 44) == [(12, 20)]


def test_an_opening_and_a_request_keep_by_scores(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    text = {"max_tokens": 60, "ignore_eos": True}
    with edgekit.open(artifact, window=64, sinks=4, keep="scored") as runtime:
        assert runtime.policy.keep == "valuediff"
        scored = runtime.generate("def area(", **text).tokens  # type: ignore[arg-type]
        newest = runtime.generate("def area(", window=64, sinks=4, **text).tokens  # type: ignore[arg-type]
        with pytest.raises(Unsupported, match="cannot keep tokens by no-such; it can by newest, valuediff"):
            runtime.generate("def", window=64, keep="no-such")
    with edgekit.open(artifact, window=64, sinks=4) as runtime:
        assert runtime.generate("def area(", **text).tokens == newest  # type: ignore[arg-type]
        limits = {"window": 64, "sinks": 4, "keep": "scored", **text}
        assert runtime.generate("def area(", **limits).tokens == scored  # type: ignore[arg-type]
    assert newest != scored
    with pytest.raises(Unsupported, match="16 bits or more"):
        edgekit.open(artifact, window=64, keep="scored", kv_bits=8)
    with pytest.raises(InvalidInput, match="keep belongs to a window"):
        edgekit.open(artifact, keep="scored")


def test_an_opening_keeps_by_attention(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    text = {"max_tokens": 60, "ignore_eos": True}
    found = set()
    for way in ("newest", "scored", "snapkv"):
        with edgekit.open(artifact, window=64, sinks=4, keep=way) as runtime:
            found.add(runtime.generate("def area(", **text).tokens)  # type: ignore[arg-type]
            assert runtime.policy.keep == ("valuediff" if way == "scored" else way)
    assert len(found) == 3
    kept = predict_opening(artifact, window=256, sinks=4, keep="snapkv")
    load = load_of(kept.artifact.plan)._replace(is_open=True)
    plain, attending = (total(memory_terms(load._replace(policy=each))) for each in (None, kept.config.policy))
    assert attending - plain > load.model.heads * 256 * 32 * 4  # the weights of one layer, at least


def test_bytes_are_those_of_a_plain_window_and_of_scoring(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    plain = predict_opening(artifact, window=256, sinks=4).estimate
    scored = predict_opening(artifact, window=256, sinks=4, keep="scored")
    assert scored.estimate.kv_bytes == plain.kv_bytes
    assert scored.estimate.private_bytes - plain.private_bytes == 4 * 4 * 256 * 32
    assert "window 256 by valuediff" in scored.config.summary
    assert scored.config.with_window(128).policy == KVEvictionPolicy.of(128, 4, "scored")


def test_plans_keep_by_attention_on_onnx_alone() -> None:
    asked, devices = PlanRequest(window=1024, sinks=4, keep="snapkv"), [load_profile("raspberry-pi-5-8gb")]
    plan = resolve(SUBJECT, devices, targets_for(None), asked)[0]
    assert (plan.target, plan.cache.keep) == ("onnx", "snapkv") and plan.storage.kv_bits >= 16
    assert any("to score tokens" in line for line in explain(plan, load_target(plan.target).memory))
    for target in ("llamacpp", "executorch"):
        with pytest.raises(DoesNotFit, match="no scores by snapkv"):
            resolve(SUBJECT, devices, targets_for(None), asked.model_copy(update={"target": target}))


def test_plans_keep_by_scores_where_the_target_can() -> None:
    asked = PlanRequest(window=1024, sinks=4, keep="scored")
    plan = resolve(SUBJECT, [load_profile("raspberry-pi-5-8gb")], targets_for(None), asked)[0]
    assert (plan.target, plan.cache.keep) == ("onnx", "valuediff") and plan.storage.kv_bits >= 16
    plain = asked.model_copy(update={"keep": None, "target": "onnx", "kv_bits": plan.storage.kv_bits})
    estimate = resolve(SUBJECT, [load_profile("raspberry-pi-5-8gb")], targets_for(None), plain)[0].estimate
    assert plan.estimate.kv_bytes == estimate.kv_bytes
    for request in (asked.model_copy(update={"target": "llamacpp"}), asked.model_copy(update={"kv_bits": 8})):
        with pytest.raises(DoesNotFit) as caught:
            resolve(SUBJECT, [load_profile("raspberry-pi-5-8gb")], targets_for(None), request)
        assert "keep" in str(caught.value) or "cache bits" in str(caught.value)
