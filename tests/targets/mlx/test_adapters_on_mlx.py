"""LoRA on MLX: logits equal torch with the same adapter, and do not depend on batching or chunking."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("mlx.core")

import family_models as models
import mlx_models
from adapted import adapted_reference, difference
from edgekit_mlx.engine import MlxEngine

from edgekit.contracts.engine import Chunk
from edgekit.contracts.plan import Plan
from edgekit.errors import Unsupported
from edgekit.model.lora import read_adapter
from edgekit.testing import check_engine, write_adapter

pytestmark = [pytest.mark.mlx, pytest.mark.quantize]


def with_room(family: str, rank: int, **options: int) -> tuple[Plan, Path]:
    made = mlx_models.made(family, **options)
    return made.plan.model_copy(update={"adapter_rank": rank}), made.files


@pytest.mark.parametrize("family", mlx_models.FAMILIES)
def test_adapter_logits_equal_torch(tmp_path: Path, family: str) -> None:
    context = 48 if "longrope" in family else 128
    plan, files = with_room(family, 8, context=context)
    place = write_adapter(tmp_path / "tone", plan.model, alpha=16)
    tokens = mlx_models.tokens_of(36)
    reference = mlx_models.reference(family)
    plain = models.logits_of(reference, tokens)
    expected = models.logits_of(adapted_reference(reference, read_adapter(place, plan.model)), tokens)
    assert difference(plain, expected) > 0.02, "the adapter changes nothing"
    engine = MlxEngine(plan, files)
    taken = engine.load_adapter("tone", place)
    assert taken == read_adapter(place, plan.model).parameters * 4
    bits = engine.capabilities.kv_bits[0]
    storage = plan.storage.model_copy(update={"kv_bits": bits})
    toned, bare = (engine.start(storage.model_copy(update={"adapter": name})) for name in ("tone", None))
    found, base = engine.forward([Chunk(toned, tokens[:30], 30), Chunk(bare, tokens[:30], 30)])
    assert difference(found, expected[:30]) < 1e-3, "prefill"
    assert difference(base, plain[:30]) < 1e-3, "the base beside it"
    for step, token in enumerate(tokens[30:], 30):
        found, base = engine.forward([Chunk(toned, [token], 1), Chunk(bare, [token], 1)])
        assert difference(found, expected[step : step + 1]) < 1e-3, "decode"
        assert difference(base, plain[step : step + 1]) < 1e-3, "the base beside it"
    engine.close()


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_adapters_pass_conformance_suite_bitwise(tmp_path: Path, family: str) -> None:
    plan, files = with_room(family, 8)
    one, two = (write_adapter(tmp_path / str(seed), plan.model, seed=seed, rank=seed) for seed in (3, 8))
    check_engine(lambda: MlxEngine(plan, files), exact=True, tolerance=0.0, sequences=3, adapters=(one, two))


def test_adapter_without_planned_rank_is_refused(tmp_path: Path) -> None:
    plan, files = with_room("llama", 0)
    engine = MlxEngine(plan, files)
    with pytest.raises(Unsupported, match="export it again with --adapter-rank"):
        engine.load_adapter("tone", write_adapter(tmp_path / "tone", plan.model))
    engine.close()
