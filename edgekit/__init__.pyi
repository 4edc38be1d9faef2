# The public names of this package, each imported on first use.
from edgekit.api import QuantizeOptions as QuantizeOptions, export as export, plan as plan, quantize as quantize
from edgekit.artifact.artifact import (
    Artifact as Artifact,
    open_artifact as open_artifact,
    read_manifest,
    verify as verify,
)
from edgekit.artifact.bom import bill_of_materials as bill_of_materials, model_card as model_card
from edgekit.artifact.export import ExportOptions as ExportOptions
from edgekit.artifact.sealed_head import write_head as write_head
from edgekit.common.progress import Reporter as Reporter
from edgekit.contracts.device import DeviceProfile as DeviceProfile
from edgekit.contracts.neutral import NeutralWeights as NeutralWeights
from edgekit.contracts.plan import Plan as Plan
from edgekit.contracts.recipe import Recipe as Recipe
from edgekit.device.load import load_profile as load_profile
from edgekit.errors import EdgekitError as EdgekitError
from edgekit.formats.safetensors_writer import TensorWriter as TensorWriter
from edgekit.model.lora import read_adapter as read_adapter
from edgekit.model.source import ModelSource as ModelSource, open_source as open_source, open_tensors as open_tensors
from edgekit.model.spec import ModelSpec as ModelSpec
from edgekit.model.tensors import Tensor as Tensor
from edgekit.planner.request import find_recipe as find_recipe
from edgekit.quant.neutral_gguf import write_neutral_gguf
from edgekit.quant.options import QuantOptions as QuantOptions
from edgekit.quant.own_integers import recipe_of as recipe_of
from edgekit.quant.reference_decoder import logits
from edgekit.runtime.async_runtime import AsyncRuntime as AsyncRuntime, AsyncStream as AsyncStream
from edgekit.runtime.generation.chat_template import ChatTemplate as ChatTemplate, read_template as read_template
from edgekit.runtime.generation.sampling import Logprob as Logprob
from edgekit.runtime.generation.tokenizer import Codec as Codec, read_codec as read_codec, read_eos as read_eos
from edgekit.runtime.generation.tool_call_deltas import ToolCallDelta as ToolCallDelta
from edgekit.runtime.generation.tool_call_formats import ToolCall as ToolCall
from edgekit.runtime.generation.tool_calls import parse_tool_calls as parse_tool_calls
from edgekit.runtime.memory.report import MemoryClass as MemoryClass
from edgekit.runtime.metrics import Metrics as Metrics, Timings as Timings
from edgekit.runtime.open import open_runtime, predict_opening as predict_opening
from edgekit.runtime.open_options import OpenOptions as OpenOptions
from edgekit.runtime.options import Options as Options
from edgekit.runtime.reading_request import ReadingJob as ReadingJob
from edgekit.runtime.recommended import chat_sampling as chat_sampling
from edgekit.runtime.runtime import Runtime as Runtime
from edgekit.runtime.scoring import Score as Score, Scoring as Scoring
from edgekit.runtime.speculation.speculation import SpeculationReport as SpeculationReport
from edgekit.runtime.stream import Answer as Answer, Stream as Stream
from edgekit.runtime.text_assembler import Piece as Piece

read_artifact = read_manifest
reference_logits = logits
write_gguf = write_neutral_gguf
open = open_runtime  # noqa: A001 - edgekit.open is the door

__version__: str
__all__: list[str]
