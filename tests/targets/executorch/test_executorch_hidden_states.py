"""Hidden states of the executorch target: further outputs of `append`, which share its weights and change no logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("executorch")

import torch
from eagle3_heads import features_of, torch_features, write_head
from edgekit_executorch.export import content_key
from edgekit_executorch.layout import FORWARD, PROGRAM
from edgekit_executorch.program import LoadedProgram
from executorch_models import Made, apart, engine_logits, program
from family_models import reference_of, tokens_of

from edgekit.errors import DamagedArtifact
from edgekit.model.head_spec import HeadSpec
from edgekit.model.heads import read_head
from edgekit.testing import check_engine

pytestmark = [pytest.mark.executorch, pytest.mark.quantize, pytest.mark.slow]

LAYERS = (2, 1, 2)  # in another order than the model's, and one twice
TOKENS = list(tokens_of(40, seed=3))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> HeadSpec:
    model = program("qwen2", "float32").weights.model
    return read_head(write_head(tmp_path_factory.mktemp("head") / "head", model, layers=LAYERS), model).spec


def test_hidden_states_are_those_of_transformers(head: HeadSpec) -> None:
    made = program("qwen2", "float32", drafter=head)
    engine = made.open()
    found = features_of(engine, TOKENS, [16, 1, 16, 7])
    engine.close()
    assert apart(found, torch_features(reference(made), TOKENS, LAYERS)) < 1e-5


def test_conformance_holds_with_hidden_states(head: HeadSpec) -> None:
    made = program("qwen2", "s4-g32", exits=(1,), drafter=head)
    check_engine(lambda: made.open(exact=True), exact=True, tolerance=0.0, sequences=6)
    check_engine(made.open, exact=False, tolerance=0.3, sequences=6)


def test_the_program_has_the_logits_and_the_weights_of_one_without_a_head(head: HeadSpec) -> None:
    plain, made = program("qwen2", "s4-g32", exits=(1,)), program("qwen2", "s4-g32", exits=(1,), drafter=head)
    logits = []
    for each in (plain, made):
        engine = each.open()
        logits.append(engine_logits(engine, TOKENS))
        engine.close()
    np.testing.assert_array_equal(*logits)
    sizes = [(each.files / PROGRAM).stat().st_size for each in (plain, made)]
    smallest = plain.weights.model.hidden_size**2 // 2  # bytes of the smallest matrix in four bits
    assert abs(sizes[1] - sizes[0]) < smallest
    assert content_key(plain.plan, plain.weights) != content_key(made.plan, made.weights)


def test_the_vendors_method_returns_logits_alone(head: HeadSpec) -> None:
    made = program("qwen2", "s4-g32", exits=(1,), drafter=head)
    loaded = LoadedProgram(made.files / PROGRAM, 1)
    assert loaded.features == (1, 2)
    outputs = loaded._method(FORWARD).execute([torch.tensor([TOKENS[:5]]), torch.tensor([0])])
    logits, *hidden = loaded.append(TOKENS[:5], 0, [4])
    np.testing.assert_array_equal(outputs[0].numpy(), logits)
    assert len(outputs) == 1 and [each.shape for each in hidden] == [(5, made.plan.model.hidden_size)] * 2
    loaded.close()


def test_a_program_without_the_planned_hidden_states_is_refused(head: HeadSpec) -> None:
    plain = program("qwen2", "s4-g32", exits=(1,))
    with pytest.raises(DamagedArtifact, match=r"hidden states after layers \[\], its plan asks for \[1, 2\]"):
        plain.open(drafter=head)


def reference(made: Made) -> Any:
    return reference_of(made.weights.folder.parent.parent / "model", made.weights)
