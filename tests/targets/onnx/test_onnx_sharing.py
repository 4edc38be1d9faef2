"""Layers that share keys and values and have inputs of their own (Gemma 4) on onnxruntime: the suite, texts, states."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx.audit import audit
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import FAST
from edgekit_onnx.prepacking import pack
from onnx_models import OnnxModel, onnx_model
from recurrent_checks import check_batch_of_eight
from runtimes import codec
from speculating import check_drafts_change_no_text

from edgekit.contracts.feeding import feed
from edgekit.contracts.token_costs import kv_bytes
from edgekit.errors import DamagedArtifact
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.prefix_cache.tree import Prefixes, PrefixKey, Reuse
from edgekit.testing import check_engine

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

TOKENS = [int(token) for token in models.tokens_of(120, seed=3)]


@pytest.fixture(scope="module")
def made() -> OnnxModel:
    return onnx_model("gemma4", "s4-g64", FAST, sequences=8)


def test_exact_mode_is_bitwise(made: OnnxModel) -> None:
    check_engine(lambda: made.open(exact=True), exact=True, tolerance=0, sequences=60)


@pytest.mark.parametrize(("family", "kv_bits"), [("gemma4", 16), ("gemma4", 8), (list(models.SHARING)[1], 32)])
def test_default_mode_equals_up_to_rounding(family: str, kv_bits: int) -> None:
    made = onnx_model(family, "s4-g64")
    tolerance = 1e-5 if kv_bits == 32 else 0.1
    check_engine(lambda: made.open(kv_bits=kv_bits), exact=False, tolerance=tolerance, sequences=40)


def test_the_cache_of_shared_layers_is_stored_once(made: OnnxModel) -> None:
    engine = made.open()
    state = engine.start(made.plan.storage)
    feed(engine, state, TOKENS[:40])
    own = [layer for layer in made.plan.model.layers if layer.stores_kv]
    assert (len(own), len(made.plan.model.layers)) == (3, 6)
    segment = state.save(0, 40)
    per_token = sum(2 * layer.kv_heads * layer.head_dim * 4 for layer in own)
    assert sum(array.nbytes for array in segment.arrays) == 40 * per_token
    assert kv_bytes(made.plan.model, 40, 32, bounds_windows=False) == 40 * per_token
    engine.close()


def test_drafts_change_no_text_in_exact_mode() -> None:
    vocabulary = codec().vocabulary
    sizes = {"vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary}
    made = onnx_model("gemma4", level=FAST, config=sizes)
    check_drafts_change_no_text(partial(made.open, exact=True))


def test_eight_in_a_batch_equal_eight_alone(made: OnnxModel) -> None:
    """In exact mode to the bit."""
    check_batch_of_eight(made, 0.0, exact=True)


def test_prefixes_are_reused_and_states_continue_in_another_engine(made: OnnxModel, tmp_path: Path) -> None:
    engine = made.open(exact=True)
    reuse = Reuse(Prefixes(MemoryBudget(None)), PrefixKey("", None, 32))
    first = engine.start(engine.plan.storage)
    feed(engine, first, TOKENS[:50])
    reuse.keep(first, TOKENS[:50])
    for shared in (50, 33, 7):
        prompt = [*TOKENS[:shared], *TOKENS[60:75]]
        state, plain = engine.start(engine.plan.storage), engine.start(engine.plan.storage)
        assert reuse.restore(state, prompt, len(prompt) - 1) == shared
        found = feed(engine, state, prompt[shared:], 3)
        np.testing.assert_array_equal(found, feed(engine, plain, prompt, 3), str(shared))
        state.close()
        plain.close()
    first.save(0, 50).write(tmp_path / "state")
    expected = feed(engine, first, TOKENS[50:60], 10)
    engine.close()
    second = made.open(exact=True)
    again = second.start(second.plan.storage)
    again.restore(second.read_segment(tmp_path / "state"))
    np.testing.assert_array_equal(feed(second, again, TOKENS[50:60], 10), expected)
    second.close()


def test_packed_graphs_give_the_same_bits(tmp_path: Path) -> None:
    """With more layers than a small constant could name."""
    kinds = ["sliding_attention", "full_attention"] * 6
    made = onnx_model("gemma4", level=FAST, config={"num_hidden_layers": 12, "layer_types": kinds})
    folder = tmp_path / "packed"
    folder.mkdir()
    pack(made.files, 1, 32, audit(made.plan, made.files), folder)
    assert {path.suffix for path in folder.iterdir()} == {".onnx", ".bin"}


def test_a_second_table_of_other_sizes_is_refused(made: OnnxModel) -> None:
    smaller = made.plan.model.model_copy(
        update={"per_layer_input": made.plan.model.per_layer_input.model_copy(update={"vocab_size": 159})}  # type: ignore[union-attr]
    )
    with pytest.raises(DamagedArtifact, match="does not fit its table"):
        OnnxEngine(made.plan.model_copy(update={"model": smaller}), made.files)
