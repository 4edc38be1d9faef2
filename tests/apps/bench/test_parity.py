"""`edgekit parity`: equal artifacts pass, and each kind of damage is caught and named."""

from __future__ import annotations

from pathlib import Path

import measured
import numpy as np
import pytest
import tiny_models
from fake_artifacts import install

from edgekit import plugins
from edgekit.apps.bench.parity import Parity, parity
from edgekit.apps.bench.peers.subjects import weights_of
from edgekit.artifact.artifact import open_artifact, seal
from edgekit.common.progress import no_progress
from edgekit.common.staging import staging_for

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnx_ir")
pytestmark = [pytest.mark.quantize, pytest.mark.onnx]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(folder / "home"))
        tiny_models.artifact_of(tiny_models.write_tiny(folder / "tiny"), folder / "artifact")
    tiny_models.text_file(folder)
    return folder


@pytest.fixture(autouse=True)
def _home(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(place / "home"))


def compared(place: Path, other: Path) -> Parity:
    return parity([place / "artifact", other], text=place / "text.txt", tokens=200, progress=no_progress)[0]


def different(found: Parity) -> dict[str, str]:
    return {finding.what: finding.detail for finding in found.findings if finding.same is False}


def test_an_artifact_equals_itself(place: Path) -> None:
    found = compared(place, place / "artifact")
    assert found.is_same
    assert {finding.same for finding in found.findings} == {True}
    assert found.divergence is not None
    assert (found.divergence.kl_mean, found.divergence.kl_max, found.divergence.log_ratio) == (0.0, 0.0, 0.0)
    assert found.divergence.same_top == 1.0 and found.divergence.perplexity == found.divergence.reference_perplexity
    assert found.first_divergence is None


def test_unpacked_weights_are_the_neutral_weights_bit_for_bit(place: Path) -> None:
    artifact = open_artifact(place / "artifact")
    neutral = weights_of(artifact)
    unpacked = dict(plugins.load_target("onnx").weights(artifact.plan, artifact.folder))
    assert set(unpacked) == {tensor.name for tensor in neutral.model.tensors()}
    for name, values in unpacked.items():
        assert np.array_equal(values, neutral.tensor(name)), name


def test_one_flipped_nibble_is_caught_and_named(place: Path, tmp_path: Path) -> None:
    import onnx_ir as ir

    def flip(folder: Path) -> None:
        (body,) = folder.glob("body-*.onnx")
        tensor = ir.load(body).graph.initializers["model.layers.1.mlp.down_proj.weight"].const_value
        data = bytearray((folder / "weights.bin").read_bytes())
        data[tensor.offset + 5] ^= 0x30
        (folder / "weights.bin").write_bytes(bytes(data))

    measured.resealed(place / "artifact", tmp_path / "damaged", flip)
    found = different(compared(place, tmp_path / "damaged"))
    assert "model.layers.1.mlp.down_proj.weight[0, 11]" in found["weights"]
    assert "1 of 8,192 values differ" in found["weights"]


def test_a_wrong_rope_is_caught_and_named(place: Path, tmp_path: Path) -> None:
    artifact = open_artifact(place / "artifact")
    plan = artifact.plan
    ropes = {name: rope.model_copy(update={"theta": 100.0}) for name, rope in plan.model.ropes.items()}
    wrong = plan.model_copy(update={"model": plan.model.model_copy(update={"ropes": ropes})})
    for name, sealed_as in (("graph", plan), ("plan", wrong)):
        staging = staging_for(tmp_path / name, 1 << 20)
        plugins.load_target("onnx").export(wrong, weights_of(artifact), staging, no_progress)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (staging / file).write_bytes((artifact.folder / file).read_bytes())
        seal(staging, tmp_path / name, sealed_as, weights_sha256="0" * 64, tools={}, self_check="damaged on purpose")
    found = different(compared(place, tmp_path / "graph"))
    assert set(found) == {"positions", "answers"}
    assert "the rope or an attention window is wrong, for every weight is equal" in found["positions"]
    assert "ropes is" in different(compared(place, tmp_path / "plan"))["model"]


def test_a_swapped_template_is_caught_and_named(place: Path, tmp_path: Path) -> None:
    def swapped(folder: Path) -> None:
        measured.edit_json(
            folder / "tokenizer_config.json",
            lambda found: found.update(chat_template=tiny_models.TEMPLATE.replace("[{{ message", "<{{ message")),
        )

    measured.resealed(place / "artifact", tmp_path / "damaged", swapped)
    found = different(compared(place, tmp_path / "damaged"))
    assert set(found) == {"template"}
    assert "conversation 0" in found["template"]


def test_other_weights_change_the_logits(place: Path, tmp_path: Path) -> None:
    tiny_models.artifact_of(tiny_models.write_tiny(tmp_path / "tiny", seed=1), tmp_path / "other")
    found = compared(place, tmp_path / "other")
    assert {"weights", "answers"} <= set(different(found))
    assert found.first_divergence is not None
    assert found.first_divergence.margin >= 0


def test_the_command_names_the_difference_and_fails(place: Path, tmp_path: Path) -> None:
    def swapped(folder: Path) -> None:
        measured.edit_json(folder / "tokenizer_config.json", lambda found: found.update(chat_template="{{ messages }}"))

    measured.resealed(place / "artifact", tmp_path / "damaged", swapped)
    arguments = ["parity", str(place / "artifact"), "--text", str(place / "text.txt"), "--tokens", "64"]
    done = measured.invoked([*arguments, str(tmp_path / "damaged")])
    assert done.code == 5
    assert "NOT the same" in done.output
    assert "template     DIFFERS" in done.output
    fine = measured.invoked([*arguments, str(place / "artifact"), "--json"])
    assert fine.code == 0, fine.output
    assert Parity.model_validate_json(fine.stdout).is_same
    assert "two artifacts" in measured.refused(lambda: parity([place / "artifact"], progress=no_progress))


def test_a_target_that_cannot_unpack_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgekit.testing import FakeTarget

    install(tmp_path / "packages", monkeypatch)
    one, other = (measured.fake(tmp_path / name).folder for name in ("one", "other"))
    text = tiny_models.text_file(tmp_path)
    assert parity([one, other], text=text, tokens=64, progress=no_progress)[0].is_same
    monkeypatch.delattr(FakeTarget, "weights")
    (found,) = parity([one, other], text=text, tokens=64, progress=no_progress)
    assert [finding.same for finding in found.findings if finding.what == "weights"] == [None]
