"""Measurements as data: raw trials with their disturbances, summaries, memory and predictions.

Times are seconds on one monotonic clock. Disturbed trials are marked, and no summary contains them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from edgekit import MemoryClass, SpeculationReport
from edgekit.common.base import Frozen

Metric = Literal[
    "prefill_tokens_per_s", "decode_tokens_per_s", "first_token_s", "gap_p50_s", "gap_p90_s", "gap_p99_s", "gap_max_s",
    "total_s", "together_tokens_per_s",
]  # fmt: skip
TrialStatus = Literal["valid", "contended", "throttled", "refused", "failed"]
_Text = Annotated[str, Field(max_length=2000)]
_Count = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Formats(Frozen):
    """A subject's storage formats of the model."""

    linears: _Text
    embedding: _Text
    head: _Text
    bits_per_weight: float
    file_bytes: _Count
    same_integers: bool | None  # True: the weights equal the artifact's neutral weights bit for bit; None: not compared


class SubjectInfo(Frozen):
    """The description of a subject."""

    name: _Text
    engine: _Text  # e.g. "edgekit onnx cpu", "llama.cpp"
    engine_version: _Text
    model: _Text
    recipe: _Text
    formats: Formats
    artifact_sha256: str | None = None  # None for a peer
    weights_sha256: str | None = None
    device: str | None = None  # the profile of its plan
    threads: _Count
    context: _Count
    kv_bits: _Count
    window: int | None = None
    sinks: _Count = 0
    keep: _Text | None = None  # the scorer by which a window keeps tokens; None: the newest are kept
    exact: bool = False
    draft: str | None = None  # the drafter
    sequences: Annotated[int, Field(ge=1)] = 1  # concurrent requests
    prefix_bytes: _Count = 0  # size of the prefix cache, which the requests of one trial share


class Conditions(Frozen):
    """The conditions of a measurement; None: not reported by this machine."""

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
    read_gb_s: float | None  # of the whole machine, measured before the run
    read_gb_s_after: float | None = None
    fp32_tflops: float | None = None  # of matrix products in float32 on all cores, measured before the run
    versions: dict[str, str]
    canary_s: _Seconds  # best time of a fixed piece of work on every core
    not_told: tuple[_Text, ...] = ()


class RequestTimes(Frozen):
    """The times of one request of a trial."""

    prompt_tokens: _Count
    timed_tokens: _Count  # tokens of the prompt after the depth
    tokens: _Count  # generated tokens
    prefill_s: _Seconds  # of the timed tokens, until the first token was written
    first_token_s: _Seconds
    decode_s: _Seconds  # from the first token to the last
    gaps_s: tuple[float, ...]  # between tokens
    proposed: _Count = 0  # draft tokens
    accepted: _Count = 0
    cached_tokens: _Count = 0  # of the prompt, from the prefix cache


class Together(Frozen):
    """Concurrent requests: the tokens of all, and the seconds until the last one ended."""

    tokens: _Count
    seconds: _Seconds


class Trial(Frozen):
    """One run of a case. `invalid` names its disturbance."""

    repeat: _Count
    attempt: _Count
    process: _Count = 0  # number of the subject's process
    requests: Annotated[tuple[RequestTimes, ...], Field(min_length=1)]
    total_s: _Seconds
    canary_before: float  # over the best time: 1 is undisturbed
    canary_after: float
    waited_share: float | None  # time that its threads were ready without a core, over wall time
    others_share: float | None  # share of all cores used by other processes or stolen from this machine
    together: tuple[Together, ...] = ()  # one per request of the case, if users were concurrent
    invalid: Literal["contended", "throttled"] | None = None


class Summary(Frozen):
    """A summary of one metric over the valid trials."""

    median: float
    low: float
    high: float
    spread: float  # (high - low) / median
    count: _Count


class CaseResult(Frozen):
    """The result of one case on one subject."""

    case: str
    prompt_tokens: tuple[int, ...]  # of each request
    depth_tokens: int = 0
    refused: _Text | None = None  # why it was not run
    trials: tuple[Trial, ...] = ()
    summary: dict[Metric, Summary] = Field(default_factory=dict)  # empty without a valid trial
    roofline: float | None = None  # bytes read per token × tok/s, over the measured read bandwidth
    matrix_share: float | None = None  # operations of prefill, as a share of the float32 products possible in that time
    bytes_per_token: int | None = None  # read by a step with all concurrent requests


class MemoryUse(Frozen):
    """The memory of the subject's process, as counted by the OS."""

    peak_bytes: int | None
    peak_counter: _Text
    pss_bytes: int | None = None
    anonymous_bytes: int | None = None
    rss_bytes: int | None = None
    classes: tuple[MemoryClass, ...] = ()  # predicted and measured, if the runtime reports classes


class Predicted(Frozen):
    """The plan's predictions; bytes are for the options with which the artifact was opened."""

    total_bytes: int
    private_bytes: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float | None
    first_token_s: float | None
    basis: _Text


class Measurement(Frozen):
    """One subject on one workload."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    version: Literal[1] = 1
    kind: Literal["measurement"] = "measurement"
    status: TrialStatus
    why: _Text = ""
    subject: SubjectInfo = Field(alias="arm")
    workload: str
    workload_sha256: str
    conditions: Conditions
    load_s: tuple[float, ...]  # per process, with the import of the vendor library; the first may pack weights
    memory: MemoryUse
    predicted: Predicted | None
    cases: tuple[CaseResult, ...]
    speculation: SpeculationReport | None = None  # None without drafting
    notes: tuple[_Text, ...] = ()

    def case(self, name: str) -> CaseResult | None:
        return next((case for case in self.cases if case.case == name), None)
