"""edgekit: one model spec in, the right quantised artifact for every device out, one runtime to run them all.

`__all__` is the public interface; each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.common.lazy import lazy
from edgekit.errors import EdgekitError

if TYPE_CHECKING:
    from edgekit.api import QuantizeOptions, export, plan, quantize
    from edgekit.artifact.artifact import Artifact, open_artifact, verify
    from edgekit.artifact.artifact import read_manifest as read_artifact
    from edgekit.artifact.bom import bill_of_materials, model_card
    from edgekit.artifact.export import ExportOptions
    from edgekit.common.progress import Reporter
    from edgekit.contracts.device import DeviceProfile
    from edgekit.contracts.neutral import NeutralWeights
    from edgekit.contracts.plan import Plan
    from edgekit.contracts.recipe import Recipe
    from edgekit.device.load import load_profile
    from edgekit.model.source import ModelSource, open_source, open_tensors
    from edgekit.model.spec import ModelSpec
    from edgekit.model.tensors import Tensor
    from edgekit.planner.request import find_recipe
    from edgekit.quant.options import QuantOptions
    from edgekit.runtime.async_runtime import AsyncRuntime, AsyncStream
    from edgekit.runtime.generation.chat_template import ChatTemplate, read_template
    from edgekit.runtime.generation.sampling import Logprob
    from edgekit.runtime.generation.tokenizer import Codec, read_codec
    from edgekit.runtime.generation.tool_call_deltas import ToolCallDelta
    from edgekit.runtime.generation.tool_call_formats import ToolCall
    from edgekit.runtime.generation.tool_calls import parse_tool_calls
    from edgekit.runtime.memory.report import MemoryClass
    from edgekit.runtime.metrics import Metrics, Timings
    from edgekit.runtime.open import open_runtime as open  # noqa: A004 - edgekit.open is the door
    from edgekit.runtime.open import predict_opening
    from edgekit.runtime.open_options import OpenOptions
    from edgekit.runtime.options import Options
    from edgekit.runtime.reading_request import ReadingJob
    from edgekit.runtime.recommended import chat_sampling
    from edgekit.runtime.runtime import Runtime
    from edgekit.runtime.scoring import Score, Scoring
    from edgekit.runtime.speculation.speculation import SpeculationReport
    from edgekit.runtime.stream import Answer, Stream
    from edgekit.runtime.text_assembler import Piece

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "Artifact",
    "AsyncRuntime",
    "AsyncStream",
    "ChatTemplate",
    "Codec",
    "DeviceProfile",
    "EdgekitError",
    "ExportOptions",
    "Logprob",
    "MemoryClass",
    "Metrics",
    "ModelSource",
    "ModelSpec",
    "NeutralWeights",
    "OpenOptions",
    "Options",
    "Piece",
    "Plan",
    "QuantOptions",
    "QuantizeOptions",
    "ReadingJob",
    "Recipe",
    "Reporter",
    "Runtime",
    "Score",
    "Scoring",
    "SpeculationReport",
    "Stream",
    "Tensor",
    "Timings",
    "ToolCall",
    "ToolCallDelta",
    "__version__",
    "bill_of_materials",
    "chat_sampling",
    "export",
    "find_recipe",
    "load_profile",
    "model_card",
    "open",
    "open_artifact",
    "open_source",
    "open_tensors",
    "parse_tool_calls",
    "plan",
    "predict_opening",
    "quantize",
    "read_artifact",
    "read_codec",
    "read_template",
    "verify",
]

_MODULES = {
    ".api": ["QuantizeOptions", "export", "plan", "quantize"],
    ".artifact.artifact": ["Artifact", "open_artifact", "read_artifact", "verify"],
    ".artifact.export": ["ExportOptions"],
    ".artifact.bom": ["bill_of_materials", "model_card"],
    ".common.progress": ["Reporter"],
    ".contracts.device": ["DeviceProfile"],
    ".contracts.neutral": ["NeutralWeights"],
    ".contracts.plan": ["Plan"],
    ".contracts.recipe": ["Recipe"],
    ".device.load": ["load_profile"],
    ".model.source": ["ModelSource", "open_source", "open_tensors"],
    ".model.spec": ["ModelSpec"],
    ".model.tensors": ["Tensor"],
    ".planner.request": ["find_recipe"],
    ".quant.options": ["QuantOptions"],
    ".runtime.async_runtime": ["AsyncRuntime", "AsyncStream"],
    ".runtime.generation.chat_template": ["ChatTemplate", "read_template"],
    ".runtime.generation.sampling": ["Logprob"],
    ".runtime.generation.tokenizer": ["Codec", "read_codec"],
    ".runtime.generation.tool_call_deltas": ["ToolCallDelta"],
    ".runtime.generation.tool_call_formats": ["ToolCall"],
    ".runtime.generation.tool_calls": ["parse_tool_calls"],
    ".runtime.memory.report": ["MemoryClass"],
    ".runtime.metrics": ["Metrics", "Timings"],
    ".runtime.open": ["open", "predict_opening"],
    ".runtime.open_options": ["OpenOptions"],
    ".runtime.options": ["Options"],
    ".runtime.reading_request": ["ReadingJob"],
    ".runtime.recommended": ["chat_sampling"],
    ".runtime.runtime": ["Runtime"],
    ".runtime.scoring": ["Score", "Scoring"],
    ".runtime.speculation.speculation": ["SpeculationReport"],
    ".runtime.stream": ["Answer", "Stream"],
    ".runtime.text_assembler": ["Piece"],
}


__getattr__ = lazy(__name__, _MODULES, {"open": "open_runtime", "read_artifact": "read_manifest"})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
