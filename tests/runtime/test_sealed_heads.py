"""Drafting heads are planned, sealed and found by `auto`, and never change a text, on every target that runs them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny_models
from assistants import CLUSTERS, VOCABULARY, write_assistant, write_gemma4
from eagle3_heads import LEGACY, write_head
from edgekit_onnx import OnnxTarget
from edgekit_onnx.memory import looked_up_bytes
from mtp_heads import part_alone, write_mtp_model
from sealed_heads import TARGETS, planned, words

import edgekit
from edgekit.artifact.artifact import HEAD_FOLDER, Artifact, open_artifact
from edgekit.artifact.export import export
from edgekit.contracts.manifest import MANIFEST
from edgekit.device.load import load_profile
from edgekit.errors import DamagedArtifact, DoesNotFit, InvalidInput, Unsupported
from edgekit.methods.drafters.assistant_decoder import AssistantDecoder
from edgekit.methods.drafters.assistant_drafter import AssistantDrafting
from edgekit.methods.drafters.head_decoder import HeadDecoder
from edgekit.methods.drafters.head_drafter import HeadDrafting
from edgekit.model import mtp
from edgekit.model.heads import EMBEDDING, read_head
from edgekit.model.source import open_source
from edgekit.planner.head_memory import head_file_bytes, head_to_seal
from edgekit.planner.memory import load_of
from edgekit.runtime.speculation.hidden_log import HiddenLog
from edgekit.testing import FixedLengthDrafting

DRAFTED = 270  # of the small tokenizer's tokens, for the part of a checkpoint


def made(place: Path) -> Path:
    """A model and its head in a folder."""
    spec = open_source(tiny_models.write_tiny(place / "model")).spec
    write_head(place / "head", spec, LEGACY, layers=(1, 1, 2), draft_vocabulary=spec.vocab_size - 5, embedding=False)
    return place


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}
KEPT: dict[str, dict[str, Any]] = {"everything": {}, "a window": {"window": 24, "sinks": 3}}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 4.0, "seed": 4},
    "penalised": {"temperature": 0.8, "top_k": 30, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 6},
    "by a schema": {"schema": SCHEMA, "temperature": 1.0, "seed": 5, "max_tokens": 40},
}


def always(artifact: Artifact) -> FixedLengthDrafting:
    """Drafting in every step by the sealed head, as if each of its tokens cost a second."""
    head = artifact.open_head()
    if head.spec.kv_layers:
        return FixedLengthDrafting(AssistantDrafting(AssistantDecoder(head), one_s=1.0, tokens=4))
    drafting = HeadDrafting(HeadDecoder(head), capacity=128, one_s=1.0, block_token_s=1.0, tokens=4)
    return FixedLengthDrafting(drafting)


def check_answers(artifact: Artifact, prompts: list[str], kept: str, **options: Any) -> tuple[int, int]:
    """Compare drafted answers, three at once, with plain decoding; return tokens proposed and accepted."""
    options = {"exact": True, **KEPT[kept], **options}
    with edgekit.open(artifact.folder, **options) as runtime:
        plain = {
            name: [runtime.generate(each, **{"max_tokens": 12, **sampling}).tokens for each in prompts]
            for name, sampling in SAMPLINGS.items()
        }
    with edgekit.open(artifact.folder, drafting=always(artifact), **options) as runtime:
        for name, sampling in SAMPLINGS.items():
            streams = [runtime.submit(each, **{"max_tokens": 12, **sampling}) for each in prompts]
            assert [stream.answer().tokens for stream in streams] == plain[name], name
        metrics = runtime.metrics()
    return metrics.proposed, metrics.accepted


def check_schemas_and_prefixes(artifact: Artifact) -> None:
    """Compare drafted answers with a schema, to a long prompt and after a prefix hit with plain decoding."""
    asked: list[tuple[str, dict[str, Any]]] = [
        (words(4, 1), {"schema": SCHEMA, "temperature": 1.0, "seed": 1}),
        (words(4, 2), {"schema": SCHEMA}),
        (words(60, 3), {"max_tokens": 20, "temperature": 3.0, "seed": 3}),
        (words(60, 3) + " " + words(3, 4), {"max_tokens": 20, "temperature": 3.0, "seed": 4}),  # after a prefix hit
    ]
    with edgekit.open(artifact.folder, exact=True, prefixes=0) as runtime:
        plain = [runtime.generate(prompt, **options).tokens for prompt, options in asked]
    with edgekit.open(artifact.folder, exact=True, drafting=always(artifact), prefixes="4MiB") as runtime:
        answers = [runtime.generate(prompt, **options) for prompt, options in asked]
        assert [answer.tokens for answer in answers] == plain
        assert answers[-1].timings.cached_tokens > 0 and runtime.metrics().accepted > 0


class Sealed(NamedTuple):
    """An artifact with a head of this kind in it, and where both came from."""

    kind: str
    model: Path
    head: Path
    artifact: Artifact


def with_head(kind: str, place: Path) -> tuple[Path, Path]:
    """A model and its head: next to it, in its checkpoint, or one that reads its cache."""
    if kind == "eagle3":
        return made(place) / "model", place / "head"
    if kind == "mtp":
        return (model := write_mtp_model(place / "model")), model
    model = write_gemma4(place / "model")
    return model, write_assistant(place / "head", model, clusters=CLUSTERS)


def on(target: str, kind: str) -> Any:
    marks = [getattr(pytest.mark, target)] + ([] if target == "onnx" else [pytest.mark.slow])
    marks += [pytest.mark.quantize] if target == "executorch" else []
    return pytest.param((kind, target), marks=marks, id=f"{kind} {target}")


EAGLE3 = [on(target, "eagle3") for target in TARGETS]
ASSISTANTS = [on(target, "assistant") for target in ("onnx", "mlx")]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    return cache(lambda kind: with_head(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module")
def folder(heads: Callable[[str], tuple[Path, Path]]) -> Path:
    return heads("eagle3")[0].parent


@pytest.fixture(scope="module", params=[*EAGLE3, on("onnx", "mtp"), on("mlx", "mtp"), *ASSISTANTS])
def sealed(heads: Callable[[str], tuple[Path, Path]], request: pytest.FixtureRequest) -> Sealed:
    kind, target = request.param
    pytest.importorskip(TARGETS[target])
    model, head = heads(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "DRAFT_TOKENS", DRAFTED)
        return Sealed(kind, model, head, export(planned(model, head, target=target), model.parent / target))


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path_factory.getbasetemp() / "home"))
    monkeypatch.setattr(mtp, "DRAFT_TOKENS", DRAFTED)


STATED: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "mtp": {"kind": "mtp", "draft_vocab_size": DRAFTED},
    "assistant": {"kind": "assistant", "clusters": CLUSTERS, "draft_vocab_size": VOCABULARY, "kv_layers": [2, 2, 2, 3]},
}


def test_the_plan_states_and_counts_the_head(sealed: Sealed) -> None:
    plan = sealed.artifact.plan
    plain = planned(sealed.model, sealed.head, target=plan.target, drafter=None)
    stated = json.loads((sealed.artifact.folder / MANIFEST).read_text())["plan"]["drafter"]
    assert STATED[sealed.kind].items() <= stated.items()
    shapes = dict(plan.drafter.tensors())
    if sealed.kind == "assistant":
        assert not any(name.endswith(("k_proj.weight", "v_proj.weight", "k_norm.weight")) for name in shapes)
    halved = "lm_head.weight" if sealed.kind == "assistant" else ""
    matrices = sum(int(np.prod(shape)) * (2 if name == halved else 4) for name, shape in shapes.items())
    mapped = plan.estimate.mapped_weights_bytes - plain.estimate.mapped_weights_bytes
    if sealed.kind == "eagle3" and not plan.drafter.own_embedding:
        rows = looked_up_bytes(load_of(plan), plan.context) if plan.target == "onnx" else 0
        assert mapped == matrices + rows
    else:
        assert mapped >= matrices
    assert plan.estimate.draft_bytes > 0 == plain.estimate.draft_bytes
    held = (sealed.artifact.folder / HEAD_FOLDER / "model.safetensors").stat().st_size
    slack = 8192 if sealed.kind == "assistant" else 4096
    assert 0 < plan.estimate.disk_bytes - plain.estimate.disk_bytes - held + slack < 2 * slack


@pytest.mark.parametrize("sealed", EAGLE3, indirect=True)
def test_the_artifact_holds_the_published_head(sealed: Sealed) -> None:
    artifact = sealed.artifact
    head, published = artifact.open_head(), read_head(sealed.head, artifact.plan.model)
    for name, _ in published.spec.tensors():
        np.testing.assert_array_equal(head.floats(name), published.floats(name))
    np.testing.assert_array_equal(head.targets, published.targets)
    looked_up = artifact.plan.target != "executorch"  # the others look the model's embeddings up
    assert head.spec.own_embedding is not looked_up and (EMBEDDING in head.stored) is not looked_up


def test_a_head_has_the_embedding_sealed_where_it_cannot_be_looked_up(folder: Path) -> None:
    """A model that scales its embeddings hands out scaled ones, and a head reads them without the scale."""
    plan = planned(folder / "model", folder / "head")
    offer = OnnxTarget().offer(plan.model, load_profile(tiny_models.DEVICE), "cpu", plan.recipe)
    scaled = plan.model.model_copy(update={"embedding_scale": 8.0})
    without = offer.model_copy(update={"capabilities": offer.capabilities.model_copy(update={"kv_layers": ()})})
    own = plan.drafter.model_copy(update={"own_embedding": True})
    assert not head_to_seal(plan.drafter, plan.model, offer).own_embedding
    assert head_to_seal(plan.drafter, plan.model, without) == head_to_seal(plan.drafter, scaled, offer) == own
    assert head_to_seal(own, plan.model, offer) == own, "a head's own embedding is kept"
    saved = head_file_bytes(own) - head_file_bytes(plan.drafter)
    assert saved == 2 * plan.model.vocab_size * plan.model.hidden_size


@pytest.mark.parametrize("count", [8, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("kept", KEPT)
def test_answers_are_those_of_plain_decoding(sealed: Sealed, kept: str, count: int) -> None:
    proposed, accepted = check_answers(sealed.artifact, [words(2 + at % 20, at) for at in range(count)], kept)
    assert accepted > (5 if sealed.kind == "eagle3" else 0) and proposed > accepted


OTHER_CACHES: dict[str, dict[str, Any]] = {
    "8 bits": {"kv_bits": 8},
    "a window that keeps by score": {"window": 64, "sinks": 3, "keep": "scored"},
}


@pytest.mark.parametrize("sealed", ASSISTANTS, indirect=True)
@pytest.mark.parametrize("cache", OTHER_CACHES)
def test_answers_with_other_caches_are_too(sealed: Sealed, cache: str) -> None:
    prompts = [words(50 + 3 * place, place) for place in range(3)]
    proposed, accepted = check_answers(sealed.artifact, prompts, "everything", **OTHER_CACHES[cache])
    assert accepted > 0 and proposed > accepted


def test_json_schemas_prefix_hits_and_long_prompts_are_kept_too(sealed: Sealed) -> None:
    check_schemas_and_prefixes(sealed.artifact)


@pytest.mark.parametrize("draft", ["head", "auto"])
def test_the_sealed_head_is_found(sealed: Sealed, draft: str) -> None:
    with edgekit.open(sealed.artifact.folder, draft=draft) as runtime:
        runtime.generate(words(5, 5), max_tokens=20)
        report = runtime.speculation()
        assert report is not None and "head" in [each.name for each in report.proposals]
        assert report.draft_bytes > 0


@pytest.mark.onnx
def test_artifacts_without_a_head_and_foreign_heads_are_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    plain = tiny_models.artifact_of(folder / "model", tmp_path / "plain")
    with pytest.raises(Unsupported, match="export it with `--drafter HEAD_FOLDER`"):
        edgekit.open(plain, draft="head")
    tree = json.loads((folder / "model" / "tokenizer.json").read_text())
    tree["added_tokens"] = tree["added_tokens"][:1]
    other = shutil.copytree(folder / "head", tmp_path / "head")
    (other / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(InvalidInput, match="a draft needs the target's vocabulary"):
        planned(folder / "model", other)
    with pytest.raises(DoesNotFit, match="onnx on the CPU, mlx or executorch on XNNPACK, or no --drafter"):
        planned(folder / "model", folder / "head", target="llamacpp", recipe=None)
    plan = planned(folder / "model", folder / "head")
    changed = shutil.copytree(folder / "head", tmp_path / "changed")
    write_head(tmp_path / "new", plan.model, layers=(1, 1, 2), seed=3)
    shutil.copyfile(tmp_path / "new" / "model.safetensors", changed / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"plan again|is missing|not \["):
        export(plan.model_copy(update={"drafter_source": str(changed)}), tmp_path / "never")
    assert not (tmp_path / "never").exists()


OTHER_CONFIGS = {
    "eagle3": ('"norm_output": false', '"norm_output": true'),
    "mtp": ('"rope_theta": 10000.0', '"rope_theta": 20000.0'),
    "assistant": ('"centroid_intermediate_top_k": 3', '"centroid_intermediate_top_k": 4'),
}


def test_a_damaged_or_foreign_head_is_refused_when_the_artifact_is_opened(sealed: Sealed, tmp_path: Path) -> None:
    plan, copied = sealed.artifact.plan, Path(shutil.copytree(sealed.artifact.folder, tmp_path / "copy"))
    weights, config = (copied / HEAD_FOLDER / name for name in ("model.safetensors", "config.json"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(DamagedArtifact):
        open_artifact(copied)
    weights.write_bytes(whole)
    config.write_text(config.read_text().replace(*OTHER_CONFIGS[sealed.kind]))
    with pytest.raises(DamagedArtifact, match="not the head of the artifact's plan"):
        sealed.artifact._replace(folder=copied).open_head()
    with pytest.raises(DamagedArtifact):
        edgekit.open(copied, draft="head")
    if sealed.kind != "eagle3":  # one as published in its place, and a plan that says so
        shutil.rmtree(copied / HEAD_FOLDER)
        if sealed.kind == "mtp":
            part_alone(sealed.model, copied / HEAD_FOLDER)
        else:
            shutil.copytree(sealed.head, copied / HEAD_FOLDER)
        found = read_head(copied / HEAD_FOLDER, plan.model)
        found.close()
        changed = {"plan": plan.model_copy(update={"drafter": found.spec})}
        manifest = sealed.artifact.manifest.model_copy(update=changed)
        with pytest.raises(DamagedArtifact, match="not the head of the artifact's plan"):
            sealed.artifact._replace(folder=copied, manifest=manifest).open_head()


def test_hidden_states_are_kept_of_verified_tokens_alone_and_of_the_newest() -> None:
    log = HiddenLog(2)
    assert log.ask(4, 9) is None  # no drafter reads them
    log.most_tokens = 5
    assert log.ask(4, 9, later=5) is None and log.ask(0, 9) is None
    for start in (0, 4, 8):
        rows = log.ask(4, 9)
        assert rows is not None
        rows[:] = np.arange(start, start + 4)[:, None]
        log.keep(start + 4, 1 if start == 8 else 0)
    log.keep(99)  # of a chunk that asked for none
    assert log.num_tokens == 7
    assert [(run.start, run.rows[:, 0].tolist()) for run in log.take()] == [(4, [4, 5, 6, 7]), (8, [8, 9, 10])]
    assert log.take() == []
