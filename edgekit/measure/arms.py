"""An arm of a benchmark: an engine in a process of its own, so that its memory, load time and crashes are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from threading import Timer
from typing import Any, NamedTuple

from edgekit.errors import ContextExceeded, TargetFailed, TargetMissing
from edgekit.installed import UNREPORTED
from edgekit.measure.measurement import Arm, MemoryUse, Predicted, RequestTimes
from edgekit.runtime.drafting.speculation import SpeculationReport

_MAX_ANSWER_BYTES = 64 << 20
_CLOSE_S = 10.0


class Entrant(NamedTuple):
    """What takes part: how it is described, how its program is started, and what it is told to open."""

    arm: Arm
    command: tuple[str, ...]
    opening: dict[str, Any]
    weight_bytes: int  # that a decoded token reads
    predicted: Predicted | None = None
    cure: str = "see `edgekit doctor`"  # where what it needs is not installed
    limit_s: float = 600.0
    takes_many: bool = False  # requests at once; a program of a peer takes one after the other


class RunningArm:
    """An arm whose process is alive. Close it; an answer that takes longer than its limit ends it."""

    def __init__(self, entrant: Entrant) -> None:
        self.entrant = entrant
        self.speculation: SpeculationReport | None = None  # once `memory` was asked
        self.predicted = entrant.predicted
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            entrant.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**UNREPORTED, **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # ctrl-C at the terminal is for us; we end it
        )
        try:
            self.opened = self._ask({"op": "open", **entrant.opening})
        except BaseException:
            self.kill()
            raise

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def load_s(self) -> float:
        return float(self.opened["open_s"])

    def arm(self) -> Arm:
        """The description, with what only the running engine knows."""
        known: dict[str, Any] = {"engine_version": str(self.opened["version"]), "kv_bits": int(self.opened["kv_bits"])}
        if "file_bytes" in self.opened:
            formats = self.entrant.arm.formats
            known["formats"] = formats.model_copy(update={"file_bytes": int(self.opened["file_bytes"])})
        return self.entrant.arm.model_copy(update=known)

    def run(self, tokens: Sequence[int], depth: int, outputs: int) -> tuple[RequestTimes, list[int]]:
        """One request, and the tokens that it wrote."""
        return self.run_together([tokens], depth, outputs)[0]

    def run_together(
        self, prompts: Sequence[Sequence[int]], depth: int, outputs: int, trial: str = ""
    ) -> list[tuple[RequestTimes, list[int]]]:
        """Several requests at once, and the tokens that each wrote; what one `trial` computed no other uses."""
        asked: dict[str, Any] = {"op": "run", "depth": depth, "outputs": outputs}
        if self.entrant.takes_many:
            answers = self._ask(asked | {"prompts": [list(tokens) for tokens in prompts], "trial": trial})["answers"]
        else:
            answers = [self._ask(asked | {"tokens": list(tokens)}) for tokens in prompts]
        return [
            (_times_of(len(tokens), depth, answer), [int(token) for token in answer["tokens"]])
            for tokens, answer in zip(prompts, answers, strict=True)
        ]

    def memory(self) -> MemoryUse:
        """What its process takes; it also tells what was predicted of it as it is open, and how drafting did."""
        answer = self._ask({"op": "memory"})
        speculation, predicted = answer.pop("speculation", None), answer.pop("predicted", {})
        if speculation is not None:
            self.speculation = SpeculationReport.model_validate_json(json.dumps(speculation))
        if self.predicted is not None:
            self.predicted = self.predicted.model_copy(update={name: int(value) for name, value in predicted.items()})
        return MemoryUse.model_validate_json(json.dumps(answer))

    def close(self) -> None:
        """Let it close by itself, then end it."""
        try:
            if self._process.poll() is None:
                self._ask({"op": "close"}, limit_s=_CLOSE_S)
        except TargetFailed:
            pass  # it is ended below, whatever it does
        finally:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def __enter__(self) -> RunningArm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any], limit_s: float | None = None) -> dict[str, Any]:
        process, limit = self._process, limit_s or self.entrant.limit_s
        assert process.stdin is not None and process.stdout is not None
        timer = Timer(limit, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline(_MAX_ANSWER_BYTES)
            answer = json.loads(line)
        except (OSError, ValueError) as error:
            raise TargetFailed(f"{self.entrant.arm.name}: {self._last_words(limit)}") from error
        finally:
            timer.cancel()
        if not isinstance(answer, dict) or "error" in answer:
            raise self._refusal(answer)
        return answer

    def _refusal(self, answer: Any) -> Exception:
        name, text = (
            self.entrant.arm.name,
            answer.get("error", "no answer") if isinstance(answer, dict) else "no answer",
        )
        kind = answer.get("kind") if isinstance(answer, dict) else ""
        if kind in ("ModuleNotFoundError", "ImportError", TargetMissing.__name__):
            return TargetMissing(f"{name}: {text}; {self.entrant.cure}")
        return TargetFailed(f"{name}: {text}")

    def _last_words(self, limit_s: float) -> str:
        """Why there was no answer."""
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines()
        said = f": {words[-1][:300]}" if words else ""
        return f"its process ended with {code} or gave no answer within {limit_s:g} s{said}"


def _times_of(prompt_tokens: int, depth: int, answer: dict[str, Any]) -> RequestTimes:
    times = [float(time) for time in answer["times"]]
    # Prefill is timed from the mark that is nearest to the depth that was asked for.
    fed, at = min(((int(fed), float(at)) for fed, at in answer["marks"]), key=lambda mark: abs(mark[0] - depth))
    cached = int(answer.get("cached", 0))
    return RequestTimes(
        prompt_tokens=prompt_tokens,
        timed_tokens=prompt_tokens - max(fed, cached),
        tokens=len(times),
        prefill_s=times[0] - at,
        first_token_s=times[0] - at,
        decode_s=times[-1] - times[0],
        proposed=int(answer.get("proposed", 0)),
        accepted=int(answer.get("accepted", 0)),
        cached_tokens=cached,
        gaps_s=tuple(round(later - sooner, 9) for sooner, later in pairwise(times)),
    )


def program_of(module: str) -> tuple[str, ...]:
    """The command that runs a module of edgekit in this Python."""
    return (sys.executable, "-m", module)


def needs(tokens: int, outputs: int, context: int, window: int | None) -> str | None:
    """Why a request cannot be held; None when it can."""
    if window is not None or tokens + outputs <= context:
        return None
    return str(ContextExceeded(tokens + outputs, context, f"export with `--context {tokens + outputs}`"))
