"""Random use of one artifact for a long time: nothing may fail without a cause, and memory must stay flat.

    python -m examples.benchmarks.soak ARTIFACT --minutes 30 --json soak.json
    python -m examples.benchmarks.soak ARTIFACT --minutes 2 --only wrong --calls 5  # which kind of call grows?

Requests, batches, cancels, schemas, adapters, saved prefixes, forgotten streams, wrong options and reopenings in one
process.
Private memory is read after each reopening, when nothing is kept; beside it, what malloc has given out: where that is
flat, nothing leaks, and growth is holes between small objects. The first tenth of the time is the warm-up.

    python -m examples.benchmarks.soak ARTIFACT --serve ADAPTER --minutes 60 --json load.json

A server of ARTIFACT, an adapter of it and the demo, for 64 clients: four APIs (OpenAI's two, Anthropic's, Ollama's),
streams and whole answers, schemas, clients that leave in the middle of an answer, and requests that are wrong. No
answer may be lost, and every error has a name. `/readyz` is asked each second. Memory is that of the server and its
workers when nothing runs, after the first twelfth of the time and at the end; the slowest request of 16 tokens is
compared with the median.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.common.files import write_output
from edgekit.common.footprint import footprint_of, private_bytes_now, return_unused
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


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b", "c"]}},
    "required": ["name"],
    "additionalProperties": False,
}
WRONG: tuple[tuple[str, bytes], ...] = (
    ("/v1/chat/completions", b'{"model": "first", "messages": []}'),
    ("/v1/chat/completions", b'{"model": "first", "messages": [{"role": "usr", "content": "a"}]}'),
    ("/v1/chat/completions", b'{"model": "nobody", "messages": [{"role": "user", "content": "a"}]}'),
    ("/v1/completions", b'{"model": "first", "prompt": "a", "temperature": -1}'),
    ("/v1/completions", b'{"model": "first", "prompt": "' + b"many words " * 20_000 + b'"}'),
    ("/v1/completions", b'{"model": "first", "prom'),
    ("/v1/messages", b'{"model": "first", "max_tokens": 0, "messages": [{"role": "user", "content": "a"}]}'),
    ("/v1/responses", b'{"model": "first", "input": "a", "text": {"format": {"type": "json_schema"}}}'),
    ("/api/chat", b'{"model": "first", "messages": [{"role": "user", "content": "a"}], "format": "xml"}'),
)


class Clients:
    """Clients of one server, and what they saw."""

    def __init__(self, client: httpx.AsyncClient, until: float, seed: int) -> None:
        self.client, self.until, self.draw = client, until, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    async def run(self) -> None:
        """Make random requests until the time is over."""
        while True:
            await asyncio.sleep(self.draw.random() * 12)
            if time.monotonic() >= self.until:
                return
            kind = self.draw.choice((self._whole, self._whole, self._stream, self._leave, self._wrong, self._schema))
            try:
                await kind()
            except Exception as error:  # an answer that is lost in any way is a finding
                self.faults.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    def _text(self, most: int = 60) -> str:
        return " ".join(self.draw.choice(WORDS) for _ in range(self.draw.randint(1, most)))

    def _request(self, tokens: int, stream: bool) -> tuple[str, dict[str, Any]]:
        """Return a path and a body, of one of the APIs."""
        draw = self.draw
        model = draw.choice(("first", "first:tuned", "demo"))
        body: dict[str, Any] = {"model": model, "stream": stream, "temperature": draw.choice((0.0, 0.8))}
        path = draw.choice(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat"))
        if path == "/api/chat":
            body["options"] = {"temperature": body.pop("temperature"), "num_predict": tokens}
        else:
            body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = tokens
        text = self._text()
        field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
        body[field] = text if field == "prompt" else [{"role": "user", "content": text}]
        return path, body

    async def _whole(self) -> None:
        path, body = self._request(16, stream=False)
        begun = time.monotonic()
        answer = await self.client.post(path, json=body)
        self._judge(path, answer)
        if answer.status_code == 200:
            self.seconds["whole"].append(time.monotonic() - begun)

    async def _stream(self) -> None:
        path, body = self._request(16, stream=True)
        begun, last = time.monotonic(), ""
        async with self.client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._judge(path, answer)
                return
            async for line in answer.aiter_lines():
                last = line or last
        self.seconds["stream"].append(time.monotonic() - begun)
        self.done[f"{path} stream"] += 1
        if not re.search(r'\[DONE\]|message_stop|response\.(completed|incomplete)|"done": ?true', last):
            self.faults.append(f"{path}: a stream without its end: {last[-200:]}")

    async def _leave(self) -> None:
        path, body = self._request(self.draw.randint(16, 200), stream=True)
        async with self.client.stream("POST", path, json=body) as answer:
            count = self.draw.randint(0, 8)
            async for _ in answer.aiter_lines():
                if (count := count - 1) < 0:
                    break
        self.done["left"] += 1

    async def _wrong(self) -> None:
        path, body = self.draw.choice(WRONG)
        answer = await self.client.post(path, content=body, headers={"content-type": "application/json"})
        if answer.status_code not in (400, 404, 413, 422, 503):
            self.faults.append(f"{path}: {answer.status_code} for {body[:80]!r}")
        self._judge(path, answer)

    async def _schema(self) -> None:
        format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
        body = {
            "model": "first",
            "messages": [{"role": "user", "content": self._text(10)}],
            "response_format": format_,
            "max_tokens": 40,
        }
        answer = await self.client.post("/v1/chat/completions", json=body)
        self._judge("schema", answer)
        if answer.status_code == 200:
            choice = answer.json()["choices"][0]
            if choice["finish_reason"] == "stop" and json.loads(choice["message"]["content"])["name"] not in "abc":
                self.faults.append(f"schema: {choice}")

    def _judge(self, path: str, answer: httpx.Response) -> None:
        """Count an answer; one of 200 has tokens, and any other names its error."""
        self.done[f"{path} {answer.status_code}"] += 1
        if answer.status_code == 200:
            if '"usage"' not in answer.text and '"eval_count"' not in answer.text:
                self.faults.append(f"{path}: no usage in {answer.text[:200]}")
            return
        error = answer.json().get("error")
        named = error if isinstance(error, str) else (error or {}).get("message")
        if not named or (answer.status_code >= 500 and answer.status_code != 503):
            self.faults.append(f"{path}: {answer.status_code} {answer.text[:300]}")
        if answer.status_code == 503:
            self.done[f"503: {re.sub(r'[0-9]+', 'N', str(named))[:60]}"] += 1


def private_bytes(process: int) -> dict[str, int]:
    """Return the private memory of a process and of each that it started."""
    threads = Path(f"/proc/{process}/task").iterdir()
    started = {child for thread in threads for child in (thread / "children").read_text().split()}
    return {each: footprint_of(each) or 0 for each in (str(process), *sorted(started))}


async def load(url: str, server: int, seconds: float, clients: int) -> dict[str, Any]:
    """Run the clients twice, for a twelfth of the time and for the rest; return what was seen."""
    began = time.monotonic()
    memory: list[dict[str, int]] = []
    ready: Counter[int] = Counter()
    limits = httpx.Limits(max_connections=clients + 8)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def ask_ready() -> None:
            while True:
                ready[(await client.get("/readyz")).status_code] += 1
                await asyncio.sleep(1)

        asking = asyncio.create_task(ask_ready())
        work = Clients(client, 0, 0)
        for share in (1 / 12, 1):
            work.until = began + seconds * share
            await asyncio.gather(*(work.run() for _ in range(clients)))
            await asyncio.sleep(15)  # the answers of those who left have ended
            memory.append(private_bytes(server))
        asking.cancel()
    slowest = {kind: max(each) / statistics.median(each) for kind, each in work.seconds.items()}
    medians = {kind: statistics.median(each) for kind, each in work.seconds.items()}
    before, after = (sum(each.values()) for each in memory)
    return {
        "minutes": seconds / 60, "clients": clients, "requests": sum(work.done.values()), "done": dict(work.done),
        "faults": work.faults, "readyz": dict(ready), "memory": memory, "grew": after / before - 1,
        "median_s": medians, "slowest_over_median": slowest,
    }  # fmt: skip


def serve(artifact: Path, adapter: Path, seconds: float, clients: int) -> dict[str, Any]:
    """Start a server of two models and an adapter, and return what its clients saw."""
    command = [
        sys.executable, "-m", "edgekit", "serve", f"first={artifact}", "demo", "--port", "0", "--json",
        "--adapter", f"tuned={adapter}", "--ollama", "--keep-alive-s", "100000", "--max-per-key", str(2 * clients),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            return asyncio.run(load(url, server.pid, seconds, clients))
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, action="append", help="only this kind of call; may be given again")
    parser.add_argument(
        "--calls", type=int, default=40, help="between an opening and its end; 0 opens and closes alone"
    )
    parser.add_argument("--serve", type=Path, metavar="ADAPTER", help="over HTTP, with this adapter")
    parser.add_argument("--clients", type=int, default=64, help="of the server")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        if options.serve:
            found = serve(options.artifact, options.serve, 60 * options.minutes, options.clients)
        else:
            found = soak(options.artifact, 60 * options.minutes, options.seed, options.only or KINDS, options.calls)
    except EdgekitError as error:
        raise SystemExit(f"an error without a cause: {type(error).__name__}: {error}") from error
    print(json.dumps({key: value for key, value in found.items() if key != "samples"}, indent=1))
    if options.json:
        write_output(options.json, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
