"""A plan for a server of several GPUs as frozen, versioned JSON. Every figure of memory and speed is a prediction."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from edgekit import ModelSpec, Recipe
from edgekit.common.base import Frozen
from edgekit.common.bounds import Amount, Bytes, Count, FileBytes, Sequences, Sha256, Text, Tokens, Version, Word
from edgekit.contracts.plan import Failure

SERVER_PLAN_VERSION = 1
ServerName = Literal["vllm", "sglang", "ray", "kserve"]
KVFormat = Literal["auto", "fp8"]  # auto: 16 bits, as the activations
_Degree = Annotated[int, Field(ge=1, le=1024)]
_MOST_LAYOUTS = 10_000


class ParallelLayout(Frozen):
    """The division of a model over GPUs: `data` copies, each on `tensor` × `pipeline` GPUs."""

    tensor: _Degree
    pipeline: _Degree = 1
    data: _Degree = 1
    experts: bool = False  # expert parallelism: GPUs of `expert_group` hold whole experts instead of slices of each
    prefill: Annotated[int, Field(ge=0, le=1024)] = 0  # number of copies that only prefill

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def expert_group(self) -> int:
        """The number of ranks that share the experts; with separate prefill copies, each copy has all experts."""
        return self.tensor * (1 if self.prefill else self.data)

    @property
    def decoders(self) -> int:
        """The number of copies that decode."""
        return self.data - self.prefill

    def __str__(self) -> str:
        degrees = [("TP", self.tensor), ("PP", self.pipeline), ("DP", self.data)]
        product = " × ".join(f"{name} {degree}" for name, degree in degrees if degree > 1 or name == "TP")
        experts = f", EP {self.expert_group}" if self.experts else ""
        return product + experts + (f", {self.prefill} for prefill" if self.prefill else "")


class RankMemory(Frozen):
    """Predicted bytes on the fullest GPU, by class."""

    weights_bytes: Bytes
    kv_bytes: Bytes  # of all concurrent sequences of the GPU
    activation_bytes: Bytes
    graph_bytes: Bytes  # captured CUDA graphs
    runtime_bytes: Bytes  # driver context and communication buffers
    draft_bytes: Bytes = 0
    adapter_bytes: Bytes = 0

    @property
    def classes(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of each class."""
        return (
            ("weights", self.weights_bytes),
            ("KV", self.kv_bytes),
            ("activations", self.activation_bytes),
            ("CUDA graphs", self.graph_bytes),
            ("runtime", self.runtime_bytes),
            ("draft", self.draft_bytes),
            ("adapters", self.adapter_bytes),
        )

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.classes)


class ServerSpeed(Frozen):
    """Predicted speed with all sequences running."""

    tokens_per_s_each: Amount  # of one sequence
    tokens_per_s_all: Amount
    first_token_s: Amount
    basis: Text


class RejectedLayout(Frozen):
    """A rejected layout: the requirements it misses or, without failures, why another was better."""

    gpu: Word
    layout: ParallelLayout
    failures: tuple[Failure, ...]
    reason: Text
    memory: RankMemory | None  # None: the layout cannot divide the model
    speed: ServerSpeed | None


class ServerPlan(Frozen):
    """The decision how a server divides a model over GPUs, and the limits it is started with."""

    version: Version = SERVER_PLAN_VERSION
    predicted: Literal[True] = True  # no figure here was measured on these GPUs
    server: ServerName
    model: ModelSpec
    model_source: Text
    model_sha256: Sha256  # of config.json
    recipe: Recipe
    kv_format: KVFormat
    gpu: Word
    layout: ParallelLayout
    context: Tokens
    sequences: Sequences  # concurrent, over all copies
    memory: RankMemory
    budget_bytes: FileBytes  # of one GPU
    budget_why: Text
    memory_share: Annotated[float, Field(gt=0, le=1)]  # fraction of a GPU's memory that the server may use
    kv_tokens: Count  # tokens of KV cache that fit into one copy
    speed: ServerSpeed
    transfer_bytes: Bytes | None = None  # of KV from prefill to decode, for a prompt of half the context
    adapters: tuple[Text, ...] = ()
    adapter_rank: Count = 0
    draft: Text | None = None
    drafter: Text | None = None  # the folder of an EAGLE-3 head
    rejected: Annotated[tuple[RejectedLayout, ...], Field(max_length=_MOST_LAYOUTS)] = ()
    notes: tuple[Text, ...] = ()

    @property
    def sequences_each(self) -> int:
        """The number of concurrent sequences of one copy."""
        return -(-self.sequences // self.layout.decoders)

    def to_json(self) -> str:
        """Return the canonical text: the same plan always gives the same bytes."""
        return self.model_dump_json(indent=1) + "\n"
