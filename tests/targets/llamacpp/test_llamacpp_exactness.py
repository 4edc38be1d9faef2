"""Exact mode is refused where llama.cpp computes by kernels that break its rule. Each is planted here."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
from edgekit_llamacpp import context, engine, library
from edgekit_llamacpp.engine import LlamaCppEngine
from engines import llamacpp_model

from edgekit.errors import Unsupported

pytestmark = [
    pytest.mark.llamacpp,
    pytest.mark.quantize,
    pytest.mark.skipif(library.missing() is not None, reason=str(library.missing())),
]


@pytest.fixture(autouse=True)
def _no_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing was checked yet."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))


def start_exact(family: str) -> None:
    made = llamacpp_model(family, "s4-g32")
    opened = LlamaCppEngine(made.plan, made.files, exact=True)
    opened.start(made.plan.storage)  # closes the engine if the check fails
    opened.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", models.WIDE_HEADS])
def test_flash_attention_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_FLASH_OFF", context._FLASH_ON)
    with pytest.raises(Unsupported, match="exact mode does not hold on this machine"):
        start_exact(family)


@pytest.mark.parametrize("family", ["gemma3", models.WIDE_HEADS])
def test_kernels_of_a_lone_row_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (context, engine):
        monkeypatch.setattr(module, "LEAST_EXACT", 1)
    with pytest.raises(Unsupported, match="exact mode does not hold on this machine"):
        start_exact(family)


@pytest.mark.parametrize("family", ["gemma3", models.WIDE_HEADS])
def test_what_is_planted_is_what_is_noticed(family: str) -> None:
    start_exact(family)
