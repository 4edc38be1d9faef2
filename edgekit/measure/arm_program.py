"""The program of an arm that runs an artifact: opened and asked through the same face that users hold."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.metadata import version
from time import perf_counter
from typing import Any

import edgekit
from edgekit.errors import Unsupported
from edgekit.measure.peers.program import serve
from edgekit.runtime.metrics import Timings
from edgekit.runtime.stream import Stream


class Artifact:
    """One artifact, opened in this process."""

    def __init__(self, request: dict[str, Any]) -> None:
        # Unless it is asked for, what is timed is computed: no prompt is known from a request before.
        self._runtime = edgekit.open(request["path"], **{"prefixes": 0, **request["opening"]})
        wanted = request["opening"].get("sequences", 1)
        if self._runtime.sequences < wanted:
            raise Unsupported(f"sequences: {wanted} at once, and this engine holds {self._runtime.sequences}")
        self._adapter: str | None = None
        if "adapter" in request:
            self._adapter, files = request["adapter"]
            self._runtime.load_adapter(self._adapter, files)
        self.facts: dict[str, Any] = {
            "version": version("edgekit"),
            "kv_bits": self._runtime.storage.kv_bits,
            "notes": list(self._runtime.notes),
        }

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Every prompt at once, greedy, past the end of the text; the loop is driven here so that steps can be timed.

        Trials keep prefixes apart, as tenants do: each begins with none.
        """
        runtime = self._runtime
        with ExitStack() as stack:
            began = perf_counter()
            asked = [
                _Asked(
                    stack.enter_context(
                        runtime.submit(
                            tokens,
                            max_tokens=request["outputs"],
                            ignore_eos=True,
                            temperature=0.0,
                            adapter=self._adapter,
                            tenant=request["trial"],
                        )
                    )
                )
                for tokens in request["prompts"]
            ]
            while not all(each.timings for each in asked):
                runtime.drive()
                now = perf_counter() - began
                for each in asked:
                    each.note(now)
        return {"answers": [each.found() for each in asked]}

    def told(self) -> dict[str, Any]:
        """What was predicted of this process as it was opened, what became of each class, and of drafting."""
        memory, speculation = self._runtime.memory(), self._runtime.speculation()
        draft_bytes = 0
        if speculation is not None:
            # What was planned for a draft gives way to what the one that is open takes.
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


class _Asked:
    """One request on its way, with the times of its steps."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._marks: list[tuple[int, float]] = [(0, 0.0)]
        self._times: list[float] = []
        self._chosen: list[int] = []
        self.timings: Timings | None = None  # once it is done

    def note(self, now: float) -> None:
        """What became of it in the step that ends now."""
        stream = self._stream
        if not self._times and 0 < stream.fed_tokens < stream.prompt_tokens:
            self._marks.append((stream.fed_tokens, now))
        self._times += [now] * (stream.generated_tokens - len(self._times))
        for piece in stream.poll():
            self._chosen += piece.tokens
            self.timings = piece.timings or self.timings

    def found(self) -> dict[str, Any]:
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
    serve(Artifact)
