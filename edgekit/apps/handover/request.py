"""The requirements of a hand-over to a server, as the command line takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from edgekit import Recipe, find_recipe
from edgekit.apps.handover.server_plan import KVFormat, ServerName
from edgekit.common.base import Frozen
from edgekit.common.options import Option


class ServerRequest(Frozen):
    """The server, its GPUs and the load that it must carry."""

    to: ServerName = Field(description="The server: vllm or sglang; ray and kserve start vLLM on a cluster.")
    gpus: Annotated[tuple[str, ...], Option(name="gpu", default="H100")] = Field(
        default=(), description="A kind of GPU and how many, such as H100x4; the first group that fits is taken."
    )
    context: Annotated[int, Field(ge=16, le=1 << 27)] | None = Field(
        default=None, description="Tokens of context that must fit; without it, what the model allows, up to 8192."
    )
    sequences: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=16, description="Requests that run at the same time, each with a full context in memory."
    )
    min_tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Least decoding speed of each request while all run, in tokens a second."
    )
    max_first_token: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Most seconds to the first token of a 512-token prompt (or half the context)."
    )
    recipe: Annotated[Recipe | None, BeforeValidator(find_recipe), Option(short="r")] = Field(
        default=None,
        description="How weights are stored: a name such as s4-g128, or a YAML file of rules; by default the"
        " recipe of the neutral weights, else balanced, also with --effort quick: a plan knows no effort.",
    )
    kv_format: KVFormat = Field(
        default="auto", description="The format of the KV cache: auto is 16 bits, fp8 halves it."
    )
    disaggregate: bool = Field(
        default=False, description="Read prompts on some copies of the model and decode on the others."
    )
    expert_parallel: bool = Field(
        default=False, description="Distribute whole experts over the GPUs; without it, if that is predicted faster."
    )
    adapters: Annotated[tuple[Path, ...], Option(name="adapter")] = Field(
        default=(), description="A folder with a LoRA adapter, which the server offers in addition to the model."
    )
    draft: str | None = Field(default=None, description="A draft model, which proposes tokens to the server.")
    drafter: str | None = Field(
        default=None, description="The folder of an EAGLE-3 head, with which the server drafts (not SGLang)."
    )
