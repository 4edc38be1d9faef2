"""The program of an arm that runs an artifact: opened and asked through the same face that users hold."""

from __future__ import annotations

from importlib.metadata import version
from time import perf_counter
from typing import Any

import edgekit
from edgekit.measure.peers.program import serve


class Artifact:
    """One artifact, opened in this process."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._runtime = edgekit.open(request["path"], prefixes=0, **request["opening"])  # what is timed is computed
        engine = self._runtime.engine
        self.facts: dict[str, Any] = {
            "version": version("edgekit"),
            "kv_bits": self._runtime.storage.kv_bits,
            "notes": list(getattr(engine, "notes", ())),
        }

    def run(self, tokens: list[int], depth: int, outputs: int) -> dict[str, Any]:
        """Greedy, past the end of the text; the loop is driven here so that every step can be timed."""
        runtime = self._runtime
        began, marks = perf_counter(), [(0, 0.0)]
        times: list[float] = []
        chosen: list[int] = []
        drafted: dict[str, int] = {}
        with runtime.stream(tokens, max_tokens=outputs, ignore_eos=True, temperature=0.0) as stream:
            finished = False
            while not finished:
                runtime.drive()
                now = perf_counter() - began
                if not times and 0 < stream.fed_tokens < len(tokens):
                    marks.append((stream.fed_tokens, now))
                times += [now] * (stream.generated_tokens - len(times))
                for piece in stream.poll():
                    chosen += piece.tokens
                    if piece.timings is not None:
                        finished = True
                        drafted = {"proposed": piece.timings.proposed, "accepted": piece.timings.accepted}
        return {"marks": marks, "times": times, "tokens": chosen, **drafted}

    def close(self) -> None:
        self._runtime.close()


if __name__ == "__main__":
    serve(Artifact)
