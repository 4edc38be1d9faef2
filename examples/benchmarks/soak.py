"""Random use of one artifact for a long time: nothing may fail without a cause, and memory must stay flat.

    python -m examples.benchmarks.soak ARTIFACT --minutes 30 --json soak.json
    python -m examples.benchmarks.soak ARTIFACT --minutes 2 --only wrong --calls 5  # which kind of call grows?

Requests, batches, cancels, schemas, adapters, saved prefixes, forgotten streams, wrong options and reopenings in one
process.
Private memory is read after each reopening, when nothing is kept; beside it, what malloc has given out: where that is
flat, nothing leaks, and growth is holes between small objects. The first tenth of the time is the warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.common.files import write_output
from edgekit.common.footprint import private_bytes_now, return_unused
from edgekit.errors import EdgekitError, InvalidInput, LimitExceeded, Unsupported
from edgekit.runtime.runtime import Runtime
from edgekit.testing import write_adapter
from examples.benchmarks.process_memory import used_bytes

EXPECTED = (InvalidInput, LimitExceeded, Unsupported)  # some requests are wrong on purpose
WORDS = ("the", "river", "that", "was", "long", "and", "people", "who", "lived", "by", "it", "told", "stories")
KINDS = (
    "ask", "chat", "cancel", "forget", "schema", "wrong", "score", "together", "prefixes", "adapter",
)  # fmt: skip


class Soak:
    """Random calls on one open runtime."""

    def __init__(self, artifact: Path, draw: random.Random, folder: Path, kinds: Sequence[str], calls: int) -> None:
        """`calls`: between an opening and its end."""
        self.artifact, self.draw, self.folder, self.kinds, self.calls = artifact, draw, folder, kinds, calls
        self.done: Counter[str] = Counter()
        plan = open_artifact(artifact).plan
        ranks = range(1, 1 + min(2, plan.adapter_rank))
        self.adapters = [write_adapter(folder / f"adapter-{rank}", plan.model, seed=rank, rank=rank) for rank in ranks]

    def once(self) -> None:
        """Open, make random calls, and close; or forget to close."""
        draw = self.draw
        options: dict[str, Any] = {"context": draw.choice((256, 512)), "sequences": draw.choice((1, 2, 4))}
        if draw.random() < 0.5:
            options["prefixes"] = "16MiB"
        if draw.random() < 0.3:
            options["draft"] = "ngram"
        runtime = edgekit.open(self.artifact, **options)
        able = {"prefixes": "prefixes" in options, "adapter": bool(self.adapters)}
        calls: list[Callable[[Runtime], object]] = [
            getattr(self, f"_{kind}") for kind in self.kinds if able.get(kind, True)
        ]
        for _ in range(self.calls if calls else 0):
            call = draw.choice(calls)
            try:
                call(runtime)
                self.done[call.__name__.strip("_")] += 1
            except EXPECTED as error:
                self.done[f"refused: {type(error).__name__}"] += 1
        if draw.random() < 0.8:
            runtime.close()

    def _text(self) -> str:
        return " ".join(self.draw.choice(WORDS) for _ in range(self.draw.randint(1, 60)))

    def _sampling(self) -> dict[str, Any]:
        draw = self.draw
        return {
            "max_tokens": draw.randint(1, 24),
            "temperature": draw.choice((0.0, 0.7, 1.3)),
            "seed": draw.randrange(1 << 30),
        }

    def _ask(self, runtime: Runtime) -> object:
        return runtime.generate(self._text(), **self._sampling())

    def _chat(self, runtime: Runtime) -> object:
        return runtime.chat([{"role": "user", "content": self._text()}], **self._sampling())

    def _cancel(self, runtime: Runtime) -> object:
        with runtime.stream(self._text(), **self._sampling()) as stream:
            next(stream, None)
            stream.cancel()
            return list(stream) if self.draw.random() < 0.5 else None

    def _forget(self, runtime: Runtime) -> object:
        return next(runtime.stream(self._text(), **self._sampling()), None)

    def _schema(self, runtime: Runtime) -> object:
        names = [f"{self.draw.choice(WORDS)}{self.draw.randrange(1000)}" for _ in range(self.draw.randint(1, 200))]
        return runtime.generate(self._text(), schema={"enum": names}, **self._sampling())

    def _wrong(self, runtime: Runtime) -> object:
        wrong: dict[str, Any] = self.draw.choice(
            ({"regex": "("}, {"schema": {"type": "person"}}, {"temperature": -1.0}, {"adapter": "none"})
        )
        return runtime.generate(self._text(), **wrong)

    def _score(self, runtime: Runtime) -> object:
        return runtime.score(self._text(), [" river", " stories"])

    def _together(self, runtime: Runtime) -> object:
        streams = [runtime.stream(self._text(), **self._sampling()) for _ in range(self.draw.randint(2, 6))]
        return [stream.answer() for stream in streams]

    def _adapter(self, runtime: Runtime) -> object:
        """Load an adapter or take one that is there, answer with it, and drop it half of the time."""
        folder = self.draw.choice(self.adapters)
        if folder.name not in runtime.adapters:
            runtime.load_adapter(folder.name, folder)
        answer = runtime.generate(self._text(), adapter=folder.name, **self._sampling())
        if self.draw.random() < 0.5:
            runtime.drop_adapter(folder.name)
        return answer

    def _prefixes(self, runtime: Runtime) -> object:
        path = self.folder / "saved.prefixes"
        runtime.save_prefixes(path)
        return runtime.load_prefixes(path)


def soak(artifact: Path, seconds: float, seed: int, kinds: Sequence[str] = KINDS, calls: int = 40) -> dict[str, Any]:
    """Return the calls, and the private bytes after each reopening."""
    samples: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as name:
        work = Soak(artifact, random.Random(seed), Path(name), kinds, calls)
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds or len(samples) < 4:
            work.once()
            gc.collect()
            return_unused()
            samples.append((round(passed, 1), private_bytes_now()))
            used = used_bytes()
            said = {"s": samples[-1][0], "private_mb": round(samples[-1][1] / 1e6, 2)}
            print(json.dumps(said | ({"malloc_mb": round(used / 1e6, 2)} if used else {})), flush=True)
    warm = [size for passed, size in samples if passed >= seconds / 10] or [size for _, size in samples[1:]]
    third = max(1, len(warm) // 3)
    growth = statistics.median(warm[-third:]) - statistics.median(warm[:third])
    return {
        "artifact": artifact.name, "seconds": seconds, "seed": seed, "openings": len(samples), "calls": dict(work.done),
        "private_bytes_first": warm[0], "private_bytes_most": max(warm), "grew_bytes": int(growth), "samples": samples,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, action="append", help="only this kind of call; may be given again")
    parser.add_argument(
        "--calls", type=int, default=40, help="between an opening and its end; 0 opens and closes alone"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        found = soak(options.artifact, 60 * options.minutes, options.seed, options.only or KINDS, options.calls)
    except EdgekitError as error:
        raise SystemExit(f"an error without a cause: {type(error).__name__}: {error}") from error
    print(json.dumps({key: value for key, value in found.items() if key != "samples"}, indent=1))
    if options.json:
        write_output(options.json, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
