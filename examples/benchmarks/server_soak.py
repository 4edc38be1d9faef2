"""Bursts of good and bad clients against a server for a long time: no answer may be lost, and memory must stay flat.

    python -m examples.benchmarks.server_soak ARTIFACT --minutes 9 --json soak.json

In each burst some clients read their whole answer, and others vanish in the middle, stall, send rubbish or flood the
queue. After a burst the server must be idle again. The first tenth of the time is the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from edgekit.common.files import write_output
from examples.benchmarks.server_cost import request, server

WORDS = ("the", "river", "that", "was", "long", "and", "people", "who", "lived", "by", "it", "told", "stories")
RUBBISH = (
    b"", b"\0" * 500, b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/x HTTP/9\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n{", b"A" * 70_000,
    b"POST /v1/completions HTTP/1.1\r\nHost: evil.com\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 5\r\n\r\n[[[[[",
)  # fmt: skip
IDLE_S = 60.0


class Soak:
    """Clients of one server, and what became of them."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.draw = port, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self.idle_s: list[float] = []

    async def burst(self) -> None:
        """Some clients of every kind, all at once; then the server must be idle."""
        kinds = (self.good, self.good, self.good, self.vanishing, self.vanishing, self.stalling, self.rubbish)
        clients = [self.draw.choice(kinds)() for _ in range(self.draw.randint(4, 24))]
        if self.draw.random() < 0.2:
            clients += [self.vanishing() for _ in range(150)]
        for result in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(result, BaseException):
                self.fault(f"{type(result).__name__}: {result}")
        began, late = time.monotonic(), False
        while busy := await self.busy():
            if not late and time.monotonic() > began + IDLE_S:
                late = True
                self.fault(f"not idle after {IDLE_S:.0f} s: {busy}")
            await asyncio.sleep(0.05)
        self.idle_s.append(time.monotonic() - began)

    def body(self, tokens: int) -> dict[str, Any]:
        draw = self.draw
        text = " ".join(draw.choice(WORDS) for _ in range(draw.choice((3, 30, 200))))
        return {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "seed": draw.randrange(1000),
            "stream": draw.random() < 0.7,
            "n": draw.choice((1, 1, 1, 2)),
            "stream_options": {"include_usage": True},
        }

    async def good(self) -> None:
        """Read the whole answer, or a refusal that says when to come again."""
        body = self.body(self.draw.choice((1, 8, 40)))
        reader, writer = await request(self.port, body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if " 503 " in head.splitlines()[0]:
            if "retry-after" not in head.lower():
                self.fault("503 without Retry-After")
            self.done["refused"] += 1
        elif body["stream"]:
            text = (await reader.readuntil(b"data: [DONE]\n\n")).decode()
            written = int(re.findall(r'"completion_tokens":(\d+)', text)[-1])
            self.check(written == body["max_tokens"] * body["n"], f"{written} tokens of {body['max_tokens']}: lost")
        else:
            length = int(re.search(r"content-length: (\d+)", head, re.I)[1])  # type: ignore[index]
            usage = json.loads(await reader.readexactly(length))["usage"]
            written = usage["completion_tokens"]
            self.check(written == body["max_tokens"] * body["n"], f"{written} tokens of {body['max_tokens']}: lost")
        writer.close()

    async def vanishing(self) -> None:
        """Leave at a random moment."""
        _, writer = await request(self.port, self.body(400))
        await asyncio.sleep(self.draw.choice((0.0, 0.01, 0.1, 0.5, 1.5)))
        writer.transport.abort() if self.draw.random() < 0.5 else writer.close()
        self.done["vanished"] += 1

    async def stalling(self) -> None:
        """Read nothing for a while, and leave."""
        _, writer = await request(self.port, {**self.body(300), "logprobs": True, "top_logprobs": 20, "stream": True})
        await asyncio.sleep(3.0)
        writer.transport.abort()
        self.done["stalled"] += 1

    async def rubbish(self) -> None:
        """Send bytes that are no request of the API."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with suppress(OSError, TimeoutError):
            writer.write(self.draw.choice(RUBBISH))
            async with asyncio.timeout(0.5):
                answer = await reader.read(1000)
                self.check(b"HTTP/1.1 500" not in answer, "rubbish caused a status of 500")
        writer.transport.abort()
        self.done["rubbish"] += 1

    async def metrics(self) -> str:
        """The text of `/metrics`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        return text

    async def busy(self) -> dict[str, float]:
        """Answers on their way, and requests that run or wait, where there are any; the tokens so far beside them."""
        text = await self.metrics()
        names = ("edgekit_answers_active", "edgekit_requests_running", "edgekit_requests_waiting")
        busy = {name: number for name in names if (number := value(text, name))}
        return busy and busy | {"tokens": value(text, "edgekit_generation_tokens_total")}

    def check(self, holds: bool, otherwise: str) -> None:
        if holds:
            self.done["answered"] += 1
        else:
            self.fault(otherwise)

    def fault(self, what: str) -> None:
        self.faults.append(what)
        print(f"fault: {what}", flush=True)


def value(text: str, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)))


async def soak(port: int, minutes: float, seed: int) -> dict[str, Any]:
    """Bursts until the time is over; what was done, the faults and the private bytes after each burst."""
    found, began, private = Soak(port, seed), time.monotonic(), []
    while (passed := time.monotonic() - began) < minutes * 60:
        await found.burst()
        if passed > minutes * 6:
            private.append(value(await found.metrics(), "edgekit_process_private_bytes"))
    text = await found.metrics()
    third = max(1, len(private) // 3)
    return {
        "minutes": minutes,
        "done": dict(found.done),
        "faults": found.faults[:100],
        "idle_after_s": {"median": median(found.idle_s), "most": max(found.idle_s)},
        "bursts_after_warm_up": len(private),
        "private_mb": {
            "first_third": median(private[:third]) / 1e6,
            "last_third": median(private[-third:]) / 1e6,
            "most": max(private) / 1e6,
        },
        "failed_streams": value(text, "edgekit_failed_streams_total"),
        "disconnects": value(text, "edgekit_disconnects_total"),
        "server_errors": sum(map(float, re.findall(r'^http_requests_total{.*status="5xx".*} (\S+)$', text, re.M))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    with server(arguments.artifact, 4, 16, "--stall-s", "1") as (port, _):
        result = asyncio.run(soak(port, arguments.minutes, arguments.seed))
    print(json.dumps(result, indent=1))
    if arguments.json:
        write_output(arguments.json, (json.dumps(result, indent=1) + "\n").encode())
    if result["faults"]:
        raise SystemExit(f"{len(result['faults'])} faults")


if __name__ == "__main__":
    main()
