"""The options of choosing integers, for `quantize`, `export` and what builds on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, SkipValidation

from edgekit.common.base import Frozen
from edgekit.common.content_store import ContentStore
from edgekit.common.options import Option
from edgekit.common.progress import Reporter
from edgekit.contracts.neutral import weights_store
from edgekit.errors import quote_short
from edgekit.model.source import ModelSource
from edgekit.quant.calibration import LENGTH, MAX_SEQUENCES, SEQUENCES, Calibration
from edgekit.quant.compute import Compute
from edgekit.quant.effort import Effort, why_rounded
from edgekit.quant.methods import method_names


def _installed(method: str) -> str:
    if method not in method_names():
        raise ValueError(f"{quote_short(method)} is not installed; known: {', '.join(method_names())}")
    return method


class QuantOptions(Frozen):
    """How integers are chosen: the calibration text, the method, the effort, what computes, and the store."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    calibrate: Annotated[SkipValidation[str | Path | Calibration] | None, Option(metavar="PATH")] = Field(
        default=None,
        description="Calibration text: a file of text, jsonl of texts or chats, .npy tokens, or `default` for ours.",
    )
    method: Annotated[str, AfterValidator(_installed), Option(metavar="NAME")] | None = Field(
        default=None,
        description="rtn, gptq, awq, or a method that a package adds; without it, gptq with calibration text,"
        " else rtn.",
    )
    effort: Effort | None = Field(
        default=None,
        description="quick rounds to nearest, to 8 bits without --recipe; normal calibrates."
        " Without it, normal where that takes at most 15 minutes on this machine, else rounded.",
    )
    compute: Compute | None = Field(
        default=None,
        description="Where torch computes; without it, on a GPU that torch finds, else on the processor. edgekit was"
        " never run on a GPU.",
    )
    store: Annotated[str | Path | None, Option(metavar="PATH")] = Field(
        default=None, description="Folder for neutral weights, instead of the user's cache."
    )
    samples: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] = Field(
        default=SEQUENCES, description="Number of calibration sequences."
    )
    sample_length: Annotated[int, Field(ge=2)] = Field(default=LENGTH, description="Tokens per calibration sequence.")
    report: SkipValidation[Reporter] = Reporter()

    @property
    def weights(self) -> ContentStore | None:
        """The store of neutral weights; None: the user's cache."""
        return None if self.store is None else weights_store(Path(self.store))

    def rounds_alone(self, source: ModelSource) -> bool:
        """Return whether the default is a recipe that rounding alone makes, because it must or should be quick."""
        is_named = self.calibrate is not None or self.method not in (None, "rtn")
        return not is_named and self.effort in (None, "quick") and why_rounded(source, self.effort) is not None
