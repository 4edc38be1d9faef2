"""The requirements and preferences of a plan, as the Python API and the command line take them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from edgekit.common.base import Frozen
from edgekit.common.bounds import GpuLayers, Word
from edgekit.common.options import ByteCount, Option
from edgekit.common.parsing import read_yaml
from edgekit.contracts.recipe import Recipe, named_recipe

Prefer = Literal["balanced", "speed", "memory", "quality"]


def find_recipe(recipe: str | Recipe) -> Recipe:
    """Return a built-in recipe or a vendor's own format by name, or the rules of a YAML file; a recipe as it is."""
    if not isinstance(recipe, str):
        return recipe
    return read_yaml(Path(recipe), Recipe) if recipe.endswith((".yaml", ".yml")) else named_recipe(recipe)


_Tokens = Annotated[int, Field(ge=1, le=1 << 27)]
_Layer = Annotated[int, Field(ge=1, le=4096)]


class PlanRequest(Frozen):
    """Requirements and preferences of a plan. None leaves the choice to the planner."""

    context: Annotated[int, Field(ge=16, le=1 << 27)] | None = Field(
        default=None, description="Tokens of context that must fit; without it, what the model and the device allow."
    )
    sequences: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1, description="Requests whose caches are in memory at once."
    )
    window: _Tokens | None = Field(
        default=None, description="Keep only this many tokens in the cache, sinks included, and drop older ones."
    )
    sinks: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        default=0, description="First tokens that a window never drops."
    )
    keep: Annotated[Word | None, Option(metavar="newest|scored", default="newest")] = Field(
        default=None, description="What a window keeps in addition to the sinks (run --keep)."
    )
    kv_bits: Annotated[int, Field(ge=1, le=32)] | None = Field(
        default=None, description="Bits of a key or value in the cache; without it, the most that fit."
    )
    min_quality: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Least share of tokens (0 to 1) whose most likely token must be the float model's."
    )
    memory: Annotated[ByteCount, Field(ge=1)] | None = Field(
        default=None, description="Limit of the process's private memory, e.g. 1.5GiB; mapped weights are not counted."
    )
    min_tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Least decoding speed, in tokens a second."
    )
    max_first_token: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Most seconds to the first token of a 512-token prompt (or half the context)."
    )
    prefer: Prefer = Field(
        default="balanced",
        description="Preference among the options that fit; balanced is 4 bits unless --min-quality needs more.",
    )
    target: str | None = Field(
        default=None, description="Only this target: onnx, mlx, llamacpp, executorch or an installed one."
    )
    recipe: Annotated[Recipe, BeforeValidator(find_recipe)] | None = Field(
        default=None,
        description="Only this recipe: a name such as s4-g32, a YAML file of rules, or `keep` for the model's own"
        " integers (the default if it has them).",
    )
    bits_per_weight: Annotated[float, Field(gt=0, le=32, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Raise the most sensitive matrices of --recipe (default balanced) to 8 bits, up to this average"
        " over all weights.",
    )
    os_version: str | None = Field(default=None, description="Plan for this OS version instead of the profile's.")
    entitlements: Annotated[tuple[str, ...], Option(name="entitlement")] = Field(
        default=(), strict=False, description="An entitlement that the app has."
    )
    exits: Annotated[tuple[_Layer, ...], Option(name="exit")] = Field(
        default=(),
        strict=False,
        max_length=16,
        description="A layer after which drafts may exit (run --draft early-exit).",
    )
    adapter_rank: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0, description="Leave memory for LoRA adapters of at most this rank (run --adapter)."
    )
    drafter: str | None = Field(
        default=None,
        description="The folder of a drafting head for this model: an EAGLE-3 head, a Qwen3.5 checkpoint with its"
        " `mtp.*` tensors, or Gemma 4's assistant. It is counted in the plan and sealed with the model"
        " (run --draft auto).",
    )
    gpu_layers: GpuLayers | None = Field(
        default=None,
        description="Layers on the GPU, the head as one (llamacpp); without it, as many as its memory holds.",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="Threads, instead of one for each core."
    )
