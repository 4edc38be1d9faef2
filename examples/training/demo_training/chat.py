"""Conversations made from source code: write a function from its docstring, or describe a function."""

from __future__ import annotations

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

BOS_TEXT = "<|bos|>"
MAX_CODE = 1200
_SYSTEM = ("You write Python.", "You are a helpful assistant for Python.", "Answer with code or one plain sentence.")
_WRITE = ("Write a function `{head}`: {says}", "Write `{head}`.\n\n{says}", "{says}\nWrite it as `{head}`.")
_EXPLAIN = ("What does this do?\n\n{code}", "Explain this function.\n\n{code}", "{code}\n\nWhat is this for?")

Message = dict[str, str]


@cache
def template_text() -> str:
    """The template that the demo pair is shipped with."""
    return (Path(__file__).parents[1] / "demo" / "target" / "chat_template.jinja").read_text(encoding="utf-8")


@cache
def _template() -> Template:
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template_text())


def render(messages: list[Message]) -> str:
    return _template().render(messages=messages, bos_token=BOS_TEXT)


def conversations(text: str) -> Iterator[list[Message]]:
    """Yield a conversation for every documented function of a source file; its text decides the kind."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (says := _first_paragraph(node)):
            code = _without_docstring(lines, node)
            if len(code) <= MAX_CODE and "<|" not in code:
                yield _conversation(code, says, _head(node))


def _conversation(code: str, says: str, head: str) -> list[Message]:
    draw = hashlib.sha256(code.encode()).digest()
    form = draw[1] % 3
    if draw[0] % 3:
        question, answer = _WRITE[form].format(head=head, says=says), code
    else:
        question, answer = _EXPLAIN[form].format(code=code), says
    system = [{"role": "system", "content": _SYSTEM[draw[2] % 3]}] if draw[3] % 4 == 0 else []
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _first_paragraph(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The docstring's first paragraph in one line; nothing where it is no sentence."""
    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return paragraph if 15 <= len(paragraph) <= 240 and "<|" not in paragraph else ""


def _head(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f"{node.name}({ast.unparse(node.args)})"


def _without_docstring(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The function's own lines, from `def`, moved to the left edge, without its docstring where more follows."""
    docstring = node.body[0]
    end = node.end_lineno or node.lineno
    kept = lines[node.lineno - 1 : end]
    if len(node.body) > 1 and docstring.lineno > node.lineno and docstring.end_lineno:
        kept = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : end]
    return textwrap.dedent("\n".join(kept)).strip("\n")
