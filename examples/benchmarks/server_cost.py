"""Measures what the server costs: streaming through it against `Runtime.stream`, and `/metrics` under many requests.

    python -m examples.benchmarks.server_cost ARTIFACT [--random FOLDER] [--clients 1 8] [--tokens 64] [--rounds 5] \\
        [--waiting 1000] [-o FILE]

The server is `edgekit serve` in a process of its own. Both sides answer the same prompts in turns, alone and eight
together, and open the artifact with the same options. `--random` measures 1.1 billion random weights in `s4-g32`,
kept in the folder, with the tokenizer and the chat template of the artifact. Figures are medians over the rounds.
Processor time (of the server's process, or of the one with the Python API) says what the server adds where other
processes disturb the clock. So does the time to the first token outside the engine, which both report: how long the
engine took for the prompt varies by more than the server adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import edgekit
from edgekit.runtime.runtime import Runtime
from examples.benchmarks.random_artifacts import built
from examples.benchmarks.random_models import LLAMA_1B

CONTEXT, CLIENTS, SCRAPES = 1024, (1, 8), 50
PREFILL = "request_prefill_time_seconds"
TEXT = "The river had risen in the night, and the people of the town stood on the bridge to see what it carried. "


class Round(NamedTuple):
    """One round of some clients: seconds to the first token (mean over clients), and tokens a second of all."""

    first_s: float
    tokens_per_s: float
    processor_s: float = 0.0
    outside_s: float = 0.0  # of the time to the first token, what the engine did not take


class Times(NamedTuple):
    """The arrival times of the pieces of one answer, and its tokens."""

    pieces: list[float]
    tokens: int

    def between(self, begin: float, end: float) -> float:
        """Tokens in an interval, where every piece has as many."""
        return self.tokens * sum(begin < each <= end for each in self.pieces) / len(self.pieces)


def processor_s(process: int) -> float:
    """The processor seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prompt(number: int) -> str:
    """A prompt of about a hundred tokens that begins like no other, so nothing is cached."""
    return f"{number} " + TEXT * 4


def summary(began: float, times: list[Times], clients: int) -> Round:
    """The figures of a round. Tokens a second count while all answers run, so that prefill and the ends are apart."""
    first = sum(each.pieces[0] - began for each in times) / clients
    begin, end = max(each.pieces[0] for each in times), min(each.pieces[-1] for each in times)
    return Round(first, sum(each.between(begin, end) for each in times) / (end - begin))


def in_process(runtime: Runtime, clients: int, tokens: int, number: int) -> Round:
    """Read streams of the Python API; `poll` and `step` are what iterating over one of them does."""
    began = perf_counter()
    streams = [
        runtime.stream([{"role": "user", "content": prompt(number + each)}], max_tokens=tokens, ignore_eos=True)
        for each in range(clients)
    ]
    pieces: list[list[float]] = [[] for _ in streams]
    times: list[Times] = []
    while len(times) < clients:
        runtime.step()
        for place, stream in enumerate(streams):
            for piece in stream.poll():
                pieces[place] += [perf_counter()] if piece.text else []
                if piece.timings is not None:
                    times.append(Times(pieces[place], piece.timings.tokens))
    return summary(began, times, clients)


async def request(port: int, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Post a body to the chat endpoint."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return reader, writer


async def streamed(port: int, tokens: int, number: int) -> Times:
    """One streamed answer, read as it comes."""
    reader, writer = await request(
        port,
        {
            "messages": [{"role": "user", "content": prompt(number)}],
            "max_completion_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    pieces: list[float] = []
    count = 0
    async for line in reader:
        if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
            raise SystemExit(f"the server refused: {(await reader.read(2000)).decode('utf-8', 'replace')}")
        if line.startswith(b"data: {") and b'"content":"' in line and b'"content":""' not in line:
            pieces.append(perf_counter())
        if b'"completion_tokens":' in line:
            count = json.loads(line[6:])["usage"]["completion_tokens"]
        if line == b"data: [DONE]\n":
            break
    writer.close()
    return Times(pieces, count)


def through_the_server(port: int, clients: int, tokens: int, number: int) -> Round:
    """Answers through the server."""

    async def together() -> Round:
        began = perf_counter()
        times = await asyncio.gather(*(streamed(port, tokens, number + each) for each in range(clients)))
        return summary(began, times, clients)

    return asyncio.run(together())


def prefill_s(port: int) -> float:
    """The seconds that the server's engine has taken for prompts."""

    async def scraped() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        _, text = await timed(reader, writer, "/metrics")
        writer.close()
        return text

    return float(re.findall(rf"^edgekit_{PREFILL}_sum\S* (\S+)$", asyncio.run(scraped()), re.MULTILINE)[0])


def scrapes(port: int, waiting: int) -> dict[str, float]:
    """Milliseconds of `/metrics` while `waiting` requests run or wait, and of `/livez`, which computes nothing."""

    async def measured() -> tuple[list[float], list[float]]:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 900, "ignore_eos": True, "stream": True}
        opened = [await request(port, body) for _ in range(waiting)]
        taken: list[float] = []
        alive: list[float] = []
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while len(taken) < SCRAPES:
            shorter, _ = await timed(reader, writer, "/livez")  # before the other, which finds both sides awake
            seconds, text = await timed(reader, writer, "/metrics")
            if int(text.partition("\nedgekit_answers_active ")[2].partition("\n")[0]) >= waiting:
                taken.append(seconds)
                alive.append(shorter)
            await asyncio.sleep(0.05)
        for _, each in [*opened, (reader, writer)]:
            each.close()
        return taken, alive

    taken, alive = asyncio.run(measured())
    return {
        "median_ms": median(taken) * 1e3,
        "most_ms": max(taken) * 1e3,
        "livez_median_ms": median(alive) * 1e3,
        "requests": waiting,
    }


async def timed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> tuple[float, str]:
    """Seconds of a GET, and its body."""
    begun = perf_counter()
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = (await reader.readexactly(length)).decode()
    return perf_counter() - begun, body


@contextmanager
def server(artifact: Path, sequences: int, waiting: int, *more: str) -> Iterator[tuple[int, int]]:
    """The port and the process of `edgekit serve`."""
    command = [
        sys.executable, "-m", "edgekit", "serve", str(artifact), "--port", "0", "--json", "--context", str(CONTEXT),
        "--sequences", str(sequences), "--max-queued", str(waiting), *more,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(json.loads(process.stdout.readline())["url"].rpartition(":")[2]), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def compared(
    artifact: Path, together: list[int], tokens: int, rounds: int, port: int, process: int
) -> dict[str, dict[str, float]]:
    """Rounds of both sides in turns, for each number of clients that ask together."""
    figures = {}
    with edgekit.open(artifact, sequences=max(CLIENTS), context=CONTEXT) as runtime:
        sides: dict[str, Callable[[int, int], Round]] = {
            "python": lambda clients, number: in_process(runtime, clients, tokens, number),
            "server": lambda clients, number: through_the_server(port, clients, tokens, number),
        }
        processes = {"python": os.getpid(), "server": process}
        prefills: dict[str, Callable[[], float]] = {
            "python": lambda: runtime.histograms()[PREFILL].sum,
            "server": lambda: prefill_s(port),
        }
        for clients in together:
            found: dict[str, list[Round]] = {name: [] for name in sides}
            for number in range(rounds + 1):
                for name in sorted(sides, reverse=number % 2 == 1):
                    prefill, before = prefills[name](), processor_s(processes[name])
                    one = sides[name](clients, 1000 * clients + 10 * number)
                    one = one._replace(
                        processor_s=processor_s(processes[name]) - before,
                        outside_s=one.first_s - (prefills[name]() - prefill) / clients,
                    )
                    found[name] += [one] if number else []  # the first one warms up
            speed = {name: median(each.tokens_per_s for each in list_) for name, list_ in found.items()}
            first = {name: median(each.first_s for each in list_) for name, list_ in found.items()}
            used = {name: median(each.processor_s for each in list_) for name, list_ in found.items()}
            outside = {name: median(each.outside_s for each in list_) for name, list_ in found.items()}
            pairs = list(zip(found["server"], found["python"], strict=True))
            figures[f"{clients} clients"] = {
                **{f"{name}_tokens_per_s": value for name, value in speed.items()},
                **{f"{name}_first_ms": value * 1e3 for name, value in first.items()},
                **{f"{name}_first_outside_engine_ms": value * 1e3 for name, value in outside.items()},
                **{f"{name}_processor_ms_per_token": value * 1e3 / (clients * tokens) for name, value in used.items()},
                "more_processor_share": median(a.processor_s / b.processor_s for a, b in pairs) - 1,
                "lost_share": 1 - median(a.tokens_per_s / b.tokens_per_s for a, b in pairs),
                "later_first_ms": median(a.first_s - b.first_s for a, b in pairs) * 1e3,
            }
    return figures


def large(artifact: Path, folder: Path) -> Path:
    """An artifact of random weights in a common shape of 1.1 billion, with another artifact's tokenizer."""
    model = json.loads((artifact / "manifest.json").read_text())["plan"]["model"]
    folder.mkdir(parents=True, exist_ok=True)
    return built(folder, 0, (LLAMA_1B | {"vocab_size": model["vocab_size"]}, "s4-g32"), tokenizer=artifact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS), choices=range(1, max(CLIENTS) + 1))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("-o", "--output", type=Path, help="write the figures here as JSON too")
    parser.add_argument("--random", type=Path, help="keep random weights here and measure them")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    artifact = large(arguments.artifact, arguments.random) if arguments.random else arguments.artifact
    with server(artifact, max(CLIENTS), arguments.waiting) as (port, process):
        if arguments.rounds:
            figures |= compared(artifact, arguments.clients, arguments.tokens, arguments.rounds, port, process)
        if arguments.waiting:
            figures["metrics"] = scrapes(port, arguments.waiting)
    print(f"load average {os.getloadavg()[0]:.1f}")
    for name, values in figures.items():
        print(name, ", ".join(f"{key} {value:.4g}" for key, value in values.items()))
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
