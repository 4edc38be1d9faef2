"""Post inputs of 8 MB to every API of a real server, and measure what they take from it and from a short request.

    python tests/helpers/large_inputs.py [--past-the-limit]

Each input may take 64 MB, its refusal a second, and a short request that runs at the same time half a second more.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit

import click

from edgekit.apps.serve.service import BODY_BYTES

START = """
from sys import argv
from edgekit.apps.serve import service
from edgekit.cli import main
service.BODY_BYTES = int(argv.pop())
main()
"""
MOST_MB, MOST_REFUSAL_S, MOST_STALL_S = 64.0, 1.0, 0.5
SIZE = 8_000_000


def inputs() -> Iterator[tuple[str, str, bytes]]:
    """Yield a name, a path and a body for each way to send much."""
    prompts = {
        "short words": '"' + "a " * (SIZE // 2) + '"',
        "one word": '"' + "a" * SIZE + '"',
        "blanks": '"' + " " * SIZE + '"',
        "escapes": '"' + "\\u00e9" * (SIZE // 6) + '"',
        "numbers": "[" + "1," * (SIZE // 2) + "1]",
        "lists": "[" + "[1]," * (SIZE // 4) + "[1]]",
        "texts": "[" + '"ab",' * (SIZE // 5) + '"a"]',
    }
    user = '{{"role": "user", "content": {}}}'
    parts = "[" + '{"type": "text"},' * (SIZE // 17) + '{"type": "text", "text": "a"}]'
    for name, prompt in prompts.items():
        is_text = prompt[0] == '"'
        yield f"completions, {name}", "/v1/completions", f'{{"prompt": {prompt}, "max_tokens": 1}}'.encode()
        yield f"embeddings, {name}", "/v1/embeddings", f'{{"input": {prompt}}}'.encode()
        if is_text:
            yield f"tokenize, {name}", "/tokenize", f'{{"prompt": {prompt}}}'.encode()
            yield f"generate, {name}", "/api/generate", f'{{"model": "demo", "prompt": {prompt}}}'.encode()
            yield f"responses, {name}", "/v1/responses", f'{{"input": {prompt}}}'.encode()
            yield f"rerank, {name}", "/v1/rerank", f'{{"query": {prompt}, "documents": ["a"]}}'.encode()
        else:
            yield f"detokenize, {name}", "/detokenize", f'{{"tokens": {prompt}}}'.encode()
    for name, content in {"a text": prompts["short words"], "parts": parts}.items():
        messages = f'"messages": [{user.format(content)}]'
        yield f"chat, {name}", "/v1/chat/completions", f"{{{messages}}}".encode()
        yield f"messages, {name}", "/v1/messages", f'{{{messages}, "max_tokens": 1}}'.encode()
        yield f"count_tokens, {name}", "/v1/messages/count_tokens", f"{{{messages}}}".encode()
        yield f"ollama, {name}", "/api/chat", f'{{{messages}, "model": "demo"}}'.encode()
    short = user.format('"a"')
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},'
    tools = "[" + tool * (SIZE // len(tool)) + tool[:-1] + "]"
    yield "chat, tools", "/v1/chat/completions", f'{{"messages": [{short}], "tools": {tools}}}'.encode()
    unknown = "[" + "[]," * (SIZE // 3) + "[]]"
    yield "chat, an unknown field", "/v1/chat/completions", f'{{"messages": [{short}], "x": {unknown}}}'.encode()
    enum = "[" + '"ab",' * (SIZE // 5) + '"a"]'
    form = f'{{"type": "json_schema", "json_schema": {{"schema": {{"enum": {enum}}}}}}}'
    yield "chat, a schema", "/v1/chat/completions", f'{{"messages": [{short}], "response_format": {form}}}'.encode()


class Server:
    """A server of the bundled model, with a small context and little memory."""

    def __init__(self, most_body: int) -> None:
        command = [sys.executable, "-c", START, "serve", "demo", "--context", "256", "--sequences", "1"]
        command += ["--memory", "62MiB", "--port", "0", "--json", "--ollama"]
        self.process = subprocess.Popen([*command, str(most_body)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = urlsplit(json.loads(self.process.stdout.readline())["url"]).port

    def post(self, path: str, body: bytes) -> tuple[int, float]:
        """Return the status, and the seconds until it came."""
        connection, began = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60), time.perf_counter()
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status, time.perf_counter() - began
        finally:
            connection.close()

    def short(self) -> float:
        """Return the seconds that a short request takes."""
        status, seconds = self.post("/v1/completions", b'{"prompt": "def", "max_tokens": 2}')
        assert status == 200, status
        return seconds

    def megabytes(self, name: str) -> float:
        """Return a line of the process's status, such as VmRSS."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(name))

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


def measure(server: Server, path: str, body: bytes, at_once: int) -> tuple[set[int], float, float, float, float]:
    """Return statuses, slowest refusal, slowest short request, peak MB and MB kept, above the idle server's."""
    server.short()
    server.forget_peak()
    before, stop, slowest = server.megabytes("VmRSS"), Event(), [0.0]

    def ask() -> None:
        while not stop.is_set():
            slowest.append(server.short())

    asking = Thread(target=ask)
    asking.start()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda _: server.post(path, body), range(at_once)))
    stop.set()
    asking.join()
    peak, kept = server.megabytes("VmHWM") - before, server.megabytes("VmRSS") - before
    return {status for status, _ in answers}, max(seconds for _, seconds in answers), max(slowest), peak, kept


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--past-the-limit", action="store_true", help="let the server accept bodies of 16 MiB")
    arguments.add_argument("--at-once", type=int, default=1)
    given = arguments.parse_args()
    server = Server(16 << 20 if given.past_the_limit else BODY_BYTES)
    failed = 0
    try:
        usual = sorted(server.short() for _ in range(20))[10]
        click.echo(f"a short request takes {1000 * usual:.0f} ms, the idle server {server.megabytes('VmRSS'):.0f} MB")
        for name, path, body in inputs():
            statuses, refusal_s, stall_s, peak, kept = measure(server, path, body, given.at_once)
            too_much = (
                peak > MOST_MB * given.at_once or refusal_s > MOST_REFUSAL_S or stall_s > usual + MOST_STALL_S
                or not all(400 <= status < 500 for status in statuses)
            )  # fmt: skip
            failed += too_much
            click.echo(
                f"{name:28} {sorted(statuses)} in {refusal_s:5.2f} s; short request {stall_s:5.2f} s; "
                f"peak {peak:+7.1f} MB, kept {kept:+6.1f} MB{'  <-- too much' if too_much else ''}"
            )
    finally:
        server.process.terminate()
        server.process.wait()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
