"""A subject of a benchmark: an engine in its own process, which separates memory, load time and crashes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from edgekit import ModelSpec, SpeculationReport
from edgekit.apps.bench.measurement import MemoryUse, Predicted, RequestTimes, SubjectInfo
from edgekit.apps.bench.prompts import Encode
from edgekit.common.packages import UNREPORTED
from edgekit.common.subprocesses import PipedProcess
from edgekit.errors import ContextExceeded, EdgekitError, TargetFailed, TargetMissing

_MAX_ANSWER_BYTES = 64 << 20
_REQUEST_S, _CLOSE_S = 600.0, 10.0


class Subject(NamedTuple):
    """A system under test: its description, the command that starts its program, and the message that opens it."""

    info: SubjectInfo
    command: tuple[str, ...]
    opening: dict[str, Any]
    weight_bytes: int  # bytes of weights read per decoded token
    model: ModelSpec
    encode: Encode  # of its prompts
    predicted: Predicted | None = None
    fix: str = "see `edgekit doctor`"  # advice if a required package is missing


class RunningSubject:
    """A subject with its running process. Close it after use; a request that takes too long kills it."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.speculation: SpeculationReport | None = None  # known after `memory`
        self.predicted = subject.predicted
        self._process = PipedProcess(
            subject.command,
            env={**UNREPORTED, **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            keep_errors=True,
        )
        try:
            self.opened = self._request({"op": "open", **subject.opening})
        except BaseException:
            self._process.close()
            raise

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def load_s(self) -> float:
        return float(self.opened["open_s"])

    def info(self) -> SubjectInfo:
        """Return the description, completed by facts from the running engine."""
        known: dict[str, Any] = {"engine_version": str(self.opened["version"]), "kv_bits": int(self.opened["kv_bits"])}
        if "file_bytes" in self.opened:
            formats = self.subject.info.formats
            known["formats"] = formats.model_copy(update={"file_bytes": int(self.opened["file_bytes"])})
        return self.subject.info.model_copy(update=known)

    def run_together(
        self, prompts: Sequence[Sequence[int]], depth: int, outputs: int, trial: str = ""
    ) -> list[tuple[RequestTimes, list[int]]]:
        """Run several requests concurrently, of a peer one alone; return the times and the tokens of each.

        Trials do not share cached prefixes.
        """
        asked: dict[str, Any] = {"prompts": [list(tokens) for tokens in prompts], "depth": depth, "outputs": outputs}
        answers = self._request({"op": "run", "trial": trial, **asked})["answers"]
        return [
            (_times_of(len(tokens), depth, answer), [int(token) for token in answer["tokens"]])
            for tokens, answer in zip(prompts, answers, strict=True)
        ]

    def memory(self) -> MemoryUse:
        """Ask the process for its memory; also updates `predicted` and `speculation`."""
        answer = self._request({"op": "memory"})
        speculation, predicted = answer.pop("speculation", None), answer.pop("predicted", {})
        if speculation is not None:
            self.speculation = SpeculationReport.model_validate_json(json.dumps(speculation))
        if self.predicted is not None:
            self.predicted = self.predicted.model_copy(update={name: int(value) for name, value in predicted.items()})
        return MemoryUse.model_validate_json(json.dumps(answer))

    def close(self) -> None:
        """Ask the process to close, then end it."""
        try:
            if self._process.is_running:
                self._request({"op": "close"}, limit_s=_CLOSE_S)
        except TargetFailed:
            pass  # the process is killed below in any case
        finally:
            self._process.close()

    def __enter__(self) -> RunningSubject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, message: dict[str, Any], limit_s: float = _REQUEST_S) -> dict[str, Any]:
        try:
            answer = self._process.request(message, limit_s=limit_s, limit_bytes=_MAX_ANSWER_BYTES)
        except EOFError as error:
            raise TargetFailed(f"{self.subject.info.name}: {self._why_it_ended(limit_s)}") from error
        if "error" in answer:
            raise self._error_of(answer)
        return answer

    def _error_of(self, answer: dict[str, Any]) -> EdgekitError:
        text = f"{self.subject.info.name}: {answer['error']}"
        if answer.get("kind") in ("ModuleNotFoundError", "ImportError", TargetMissing.__name__):
            return TargetMissing(f"{text}; {self.subject.fix}")
        return TargetFailed(text)

    def _why_it_ended(self, limit_s: float) -> str:
        code, line = self._process.kill(), self._process.last_error_line()
        ending = f": {line[:300]}" if line else ""
        return f"its process ended with {code} or gave no answer within {limit_s:g} s{ending}"


def _times_of(prompt_tokens: int, depth: int, answer: dict[str, Any]) -> RequestTimes:
    times = [float(time) for time in answer["times"]]
    # Prefill is timed from the mark nearest to the requested depth.
    marks = ((int(processed), float(at)) for processed, at in answer["marks"])
    processed, at = min(marks, key=lambda mark: abs(mark[0] - depth))
    cached = int(answer.get("cached", 0))
    return RequestTimes(
        prompt_tokens=prompt_tokens,
        timed_tokens=prompt_tokens - max(processed, cached),
        tokens=len(times),
        prefill_s=times[0] - at,
        first_token_s=times[0] - at,
        decode_s=times[-1] - times[0],
        proposed=int(answer.get("proposed", 0)),
        accepted=int(answer.get("accepted", 0)),
        cached_tokens=cached,
        gaps_s=tuple(round(later - sooner, 9) for sooner, later in pairwise(times)),
    )


def context_error(
    tokens: int, outputs: int, context: int, window: int | None, *, model_limit: int | None = None
) -> str | None:
    """Return why a request of `tokens` and `outputs` does not fit, or None if it does.

    `model_limit` is the model's own maximum context, which no export can exceed.
    """
    total = tokens + outputs
    if window is not None or total <= context:
        return None
    if model_limit is not None and total > model_limit:
        fix = f"the model ends at {model_limit:,} tokens; leave this case out, or give --window"
    else:
        fix = f"export with `--context {total}`"
    return str(ContextExceeded(total, context, fix))
