"""Print random docstrings, comments and paragraphs for a reader: `tests/helpers/language_samples.py --seed 1`."""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
CODE = [path for folder in ("edgekit", "targets") for path in sorted((ROOT / folder).rglob("*.py"))]
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings() -> Iterator[str]:
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, WITH_DOCSTRING) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}, {getattr(node, 'name', 'module')}: {text}"


def comments() -> Iterator[str]:
    for path in CODE:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT and not re.match(r"# (fmt|noqa|type):", token.string):
                yield f"{path.relative_to(ROOT)}:{token.start[0]}: {token.line.strip()}"


def paragraphs() -> Iterator[str]:
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for paragraph in text.split("\n\n"):
            if len(paragraph.split()) > 12 and not paragraph.startswith(("|", "#", ":::")):
                yield f"{path.relative_to(ROOT)}: {paragraph.strip()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chosen = random.Random(given.seed)
    for title, texts in (("docstrings", docstrings()), ("comments", comments()), ("paragraphs", paragraphs())):
        click.echo(f"\n== {title}")
        for number, text in enumerate(chosen.sample(list(texts), 20), 1):
            click.echo(f"{number}. {text}")


if __name__ == "__main__":
    main()
