"""The subject program that runs an artifact through the public runtime."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.metadata import version
from time import perf_counter
from typing import Any

import edgekit
from edgekit import Stream, Timings
from edgekit.apps.bench.peers.program import serve
from edgekit.errors import Unsupported


class ArtifactProgram:
    """One artifact, opened in this process."""

    def __init__(self, request: dict[str, Any]) -> None:
        # By default there is no prefix cache, so that every timed prompt is computed.
        self._runtime = edgekit.open(request["path"], **{"prefixes": 0, **request["opening"]})
        sequences = request["opening"].get("sequences", 1)
        if self._runtime.sequences < sequences:
            raise Unsupported(f"sequences: {sequences} at once, and this engine holds {self._runtime.sequences}")
        self.facts: dict[str, Any] = {
            "version": version("edgekit"),
            "kv_bits": self._runtime.kv_config.kv_bits,
            "notes": [*request.get("notes", ()), *self._runtime.notes],
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run all prompts concurrently, greedily and ignoring end-of-text tokens, and time the scheduler's steps.

        Each trial is a separate tenant, so that it starts without cached prefixes.
        """
        runtime = self._runtime
        with ExitStack() as stack:
            began = perf_counter()
            requests = [
                _RunningRequest(
                    stack.enter_context(
                        runtime.submit(
                            tokens,
                            max_tokens=request["outputs"],
                            ignore_eos=True,
                            temperature=0.0,
                            tenant=request["trial"],
                        )
                    )
                )
                for tokens in request["prompts"]
            ]
            while not all(each.timings for each in requests):
                runtime.step()
                now = perf_counter() - began
                for each in requests:
                    each.record(now)
        return {"answers": [each.answer() for each in requests]}

    def report(self) -> dict[str, Any]:
        """Return memory by class with its prediction, and the drafting report."""
        memory, speculation = self._runtime.memory(), self._runtime.speculation()
        draft_bytes = 0
        if speculation is not None:
            # Replace the planned draft's bytes by the open draft's.
            draft_bytes = speculation.draft_bytes - memory.predicted.draft_bytes
        return {
            "classes": [each.model_dump() for each in memory.classes],
            "predicted": {
                "total_bytes": memory.predicted.total_bytes + draft_bytes,
                "private_bytes": memory.predicted.private_bytes,
            },
            "speculation": speculation.model_dump(mode="json") if speculation else None,
        }

    def close(self) -> None:
        self._runtime.close()


class _RunningRequest:
    """A running request, with the times of its steps."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._marks: list[tuple[int, float]] = [(0, 0.0)]
        self._times: list[float] = []
        self._chosen: list[int] = []
        self.timings: Timings | None = None  # known after its last step

    def record(self, now: float) -> None:
        """Record the progress after the step that ended at `now`."""
        stream = self._stream
        if not self._times and 0 < stream.processed_tokens < stream.prompt_tokens:
            self._marks.append((stream.processed_tokens, now))
        self._times += [now] * (stream.generated_tokens - len(self._times))
        for piece in stream.poll():
            self._chosen += piece.tokens
            self.timings = piece.timings or self.timings

    def answer(self) -> dict[str, Any]:
        assert self.timings is not None
        return {
            "marks": self._marks,
            "times": self._times,
            "tokens": self._chosen,
            "proposed": self.timings.proposed,
            "accepted": self.timings.accepted,
            "cached": self.timings.cached_tokens,
        }


if __name__ == "__main__":
    serve(ArtifactProgram)
