"""What a machine answers when it is measured: raw trials, what disturbed them, and what was predicted. Pure data.

Times are seconds on one monotonic clock. A trial that was disturbed says so and is in no summary.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from edgekit.frozen import Frozen
from edgekit.runtime.drafting.speculation import SpeculationReport
from edgekit.runtime.memory_report import Class

Metric = Literal[
    "prefill_tokens_per_s", "decode_tokens_per_s", "first_token_s", "gap_p50_s", "gap_p90_s", "gap_p99_s", "gap_max_s",
    "total_s", "energy_j_per_token", "together_tokens_per_s",
]  # fmt: skip
Status = Literal["valid", "contended", "throttled", "refused", "failed"]
_Text = Annotated[str, Field(max_length=2000)]
_Count = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Formats(Frozen):
    """How an arm stores the model: "int4" alone says nothing."""

    linears: _Text
    embedding: _Text
    head: _Text
    bits_per_weight: float
    file_bytes: _Count
    same_integers: bool | None  # as the artifact's neutral weights; None: nobody compared


class Arm(Frozen):
    """Who was measured."""

    name: _Text
    engine: _Text  # e.g. "edgekit onnx cpu", "llama.cpp"
    engine_version: _Text
    model: _Text
    recipe: _Text
    formats: Formats
    artifact_sha256: str | None = None  # None for a peer
    weights_sha256: str | None = None
    device: str | None = None  # the profile that it was planned for
    threads: _Count
    context: _Count
    kv_bits: _Count
    window: int | None = None
    sinks: _Count = 0
    exact: bool = False
    draft: str | None = None  # what proposes tokens
    adapter: str | None = None  # a LoRA that every request uses
    sequences: Annotated[int, Field(ge=1)] = 1  # requests that run at once
    prefix_bytes: _Count = 0  # what may be kept of computed prompts from request to request of one trial


class Conditions(Frozen):
    """What was around; None where this machine does not tell."""

    measured_at: _Text  # UTC
    machine: _Text
    machine_key: str
    os: _Text
    cores: _Count
    ram_bytes: int | None
    load_average: float | None
    power_source: _Text | None
    temperature_c: float | None
    frequency_mhz: float | None
    read_gb_s: float | None  # of the whole machine, measured just before
    read_gb_s_after: float | None = None
    versions: dict[str, str]
    canary_s: _Seconds  # the best seen of a fixed piece of work on every core
    not_told: tuple[_Text, ...] = ()


class RequestTimes(Frozen):
    """One request of a trial."""

    prompt_tokens: _Count
    timed_tokens: _Count  # of the prompt, those after the depth
    tokens: _Count  # written
    prefill_s: _Seconds  # of the timed tokens, until the first token was there
    first_token_s: _Seconds
    decode_s: _Seconds  # from the first token to the last
    gaps_s: tuple[float, ...]  # between tokens
    proposed: _Count = 0  # by a draft
    accepted: _Count = 0
    cached_tokens: _Count = 0  # of the prompt, known from a request before and not computed again


class Together(Frozen):
    """Requests that ran at once: what all of them wrote, and how long all took, prompts included."""

    tokens: _Count
    seconds: _Seconds


class Trial(Frozen):
    """One run of a case. `invalid` says what disturbed it."""

    repeat: _Count
    attempt: _Count
    process: _Count = 0  # which of the arm's fresh processes
    requests: tuple[RequestTimes, ...]
    total_s: _Seconds
    canary_before: float  # over the best seen: 1 is undisturbed
    canary_after: float
    waited_share: float | None  # time that its threads were ready and had no core, over the wall time
    others_share: float | None  # of all cores, used by other processes or stolen from this machine
    energy_j: float | None = None
    together: tuple[Together, ...] = ()  # one for each request of the case, where several ran at once
    invalid: Literal["contended", "throttled"] | None = None


class Summary(Frozen):
    """One metric over the valid trials."""

    median: float
    low: float
    high: float
    spread: float  # (high - low) / median
    count: _Count


class CaseResult(Frozen):
    """One case of a workload on one arm."""

    case: str
    prompt_tokens: tuple[int, ...]  # of each request
    depth_tokens: int = 0
    refused: _Text | None = None  # why it was not run at all
    trials: tuple[Trial, ...] = ()
    summary: dict[Metric, Summary] = Field(default_factory=dict)  # empty where no trial was valid
    roofline: float | None = None  # bytes touched a token × tok/s, over the measured read bandwidth
    bytes_per_token: int | None = None  # of a step, where several requests run at once


class MemoryUse(Frozen):
    """How much memory the arm's process took, each figure under the OS's own name for it."""

    peak_bytes: int | None
    peak_counter: _Text
    pss_bytes: int | None = None
    anonymous_bytes: int | None = None
    rss_bytes: int | None = None
    classes: tuple[Class, ...] = ()  # predicted beside measured, where the runtime keeps account


class Predicted(Frozen):
    """What the plan said; bytes are those of the artifact as it was opened."""

    total_bytes: int
    private_bytes: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float | None
    first_token_s: float | None
    basis: _Text


class Measurement(Frozen):
    """One arm on one workload."""

    version: Literal[1] = 1
    kind: Literal["measurement"] = "measurement"
    status: Status
    why: _Text = ""
    arm: Arm
    workload: str
    workload_sha256: str
    conditions: Conditions
    load_s: tuple[float, ...]  # each in a fresh process, vendor library included; the first may have packed weights
    memory: MemoryUse
    predicted: Predicted | None
    cases: tuple[CaseResult, ...]
    energy_source: _Text | None
    speculation: SpeculationReport | None = None  # what drafting came to, where something drafts
    notes: tuple[_Text, ...] = ()

    def case(self, name: str) -> CaseResult | None:
        return next((case for case in self.cases if case.case == name), None)
