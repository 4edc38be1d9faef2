"""Draws docs/run_and_plan.svg, the picture of the README, from what the commands print, and photographs the chat page.

Run `python -m docs.readme_picture` after the output of `run` or `plan` changes; a test compares the plans. The model
comes from the hub, or from the file that the tests use, where the hub cannot be reached; the picture names the hub's.
`python -m docs.readme_picture page` makes the pictures of docs/server.md; it needs Chromium.
"""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from examples.small_models import smollm2

PICTURE = Path(__file__).parent / "run_and_plan.svg"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL = f"edgekit plan {HUB_ID} --device raspberry-pi-5-8gb --target onnx --memory 150MiB"
# Each command, and how many lines of its output are shown; more follow where a plan fits.
COMMANDS = {
    f'edgekit run {HUB_ID} "Why is the sky blue?" --max-tokens 40': 3,
    f"{SMALL} --context 8192": 5,
    f"{SMALL} --window 512 --sinks 4": 5,
}
COLUMNS = 112
LINE, CHARACTER = 18, 7.55
STYLE = (
    "text{font:12.5px ui-monospace,Menlo,Consolas,monospace;fill:#d7dce5;white-space:pre}"
    ".c{fill:#8fd0ff}.b{fill:#16181d}"
)


def printed(command: str, model: str | Path) -> list[str]:
    """The results that a command prints, with the hub's name for the model."""
    words = shlex.split(command.replace(HUB_ID, str(model)))[1:]
    done = subprocess.run(
        [sys.executable, "-m", "edgekit", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": str(COLUMNS)},
        timeout=600,
    )
    named = done.stdout.replace(str(model), HUB_ID).replace(Path(model).stem, HUB_ID.partition("/")[2])
    return [each.rstrip() for line in named.splitlines() if line.strip() for each in wrapped(line)]


def wrapped(line: str) -> list[str]:
    """A line as a terminal of that width would show it, broken between words."""
    return textwrap.wrap(line, COLUMNS, drop_whitespace=False, replace_whitespace=False, break_long_words=False) or [""]


def shown(command: str, model: str | Path) -> list[str]:
    lines, most = printed(command, model), COMMANDS[command]
    return lines if len(lines) <= most else [*lines[:most], "…"]


def picture(parts: dict[str, list[str]]) -> str:
    """Commands and their output as a terminal."""
    rows = []
    for command, lines in parts.items():
        first, *others = textwrap.wrap(f"$ {command}", COLUMNS - 2, subsequent_indent="    ")
        rows += [("c", f"{first} \\" if others else first), *(("c", each) for each in others)]
        rows += [*(("o", line) for line in lines), ("o", "")]
    width, height = round(COLUMNS * CHARACTER) + 32, len(rows) * LINE + 18
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    text = [
        f'<text class="{kind}" x="16" y="{24 + place * LINE}">{escape(line)}</text>'
        for place, (kind, line) in enumerate(rows)
        if line
    ]
    back = f'<rect class="b" width="{width}" height="{height}" rx="8"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", back, *text, "</svg>\n"])


QUESTION = "Write a Python function that adds two numbers. Then explain it in a short list."
LOOKS = {"page_desktop.png": (1100, False), "page_phone.png": (390, True)}  # the width, and whether it is dark


def photograph_page(model: Path) -> None:
    """Ask the chat page one question in a browser, on each screen."""
    from tests.helpers.browser import browser  # not installed, and the other picture does not need it

    name = HUB_ID.partition("/")[2]
    command = [sys.executable, "-m", "edgekit", "serve", f"{name}={model}", "--port", "8099"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with browser() as tab:
            for file, (width, dark) in LOOKS.items():
                tab.look(width=width, dark=dark)
                open_page(tab)
                fields = {"text": QUESTION, "seed": "3", "temperature": "0.3"}
                for field, value in fields.items():
                    tab.value(f"document.getElementById({field!r}).value = {value!r}")
                tab.value("document.getElementById('form').requestSubmit()")
                until(lambda: tab.value("document.querySelector('#figures').textContent.includes('written')"))
                data = tab.ask("Page.captureScreenshot", format="png")["data"]
                (PICTURE.parent / file).write_bytes(base64.b64decode(data))
                tab.value("document.getElementById('reset').click()")
    finally:
        server.terminate()
        server.wait()


def open_page(tab: Any) -> None:
    """Load the page, as soon as the server answers, and wait for its list of models."""

    def has_models() -> bool:
        tab.visit("http://127.0.0.1:8099/")
        time.sleep(1)
        return bool(tab.value("document.querySelectorAll('#model option').length"))

    until(has_models)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)


def main() -> None:
    """Run the commands and draw what they print, or photograph the page."""
    model = smollm2()
    if "page" in sys.argv:
        photograph_page(model)
        return
    PICTURE.write_text(picture({command: shown(command, model) for command in COMMANDS}))


if __name__ == "__main__":
    main()
