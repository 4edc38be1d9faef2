"""Shell completion from `commands.json`, without importing a command.

The shell script is click's (`_EDGEKIT_COMPLETE=bash_source edgekit`). It calls edgekit with
`_EDGEKIT_COMPLETE=bash_complete` and the typed words.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def complete(shell: str, environment: dict[str, str], tree: dict[str, Any]) -> str:
    """Return the candidates in the format that click's script for bash, zsh or fish reads."""
    words, incomplete = _words(shell, environment)
    lines = []
    for kind, value, text in candidates(words, incomplete, tree):
        match shell:
            case "bash":
                lines.append(f"{kind},{value}")
            case "zsh":
                lines += [kind, value, text or "_"]
            case _:
                lines.append(f"{kind},{value}" + (f"\t{text}" if text else ""))
    return "\n".join(lines)


def candidates(words: list[str], incomplete: str, tree: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (kind, value, help) of each word that may follow `words`; kind `file`: the shell completes paths."""
    name, command, count, awaits = "", tree[""], 0, None
    for word in words:
        options = command["options"]
        if awaits is not None:
            awaits = None
        elif word in options:
            awaits = None if options[word][0] == "flag" else word
        elif f"{name} {word}".strip() in tree:
            name = f"{name} {word}".strip()
            command, count = tree[name], 0
        elif not word.startswith("-"):
            count += 1
    if awaits is not None:
        return _values(command["options"][awaits][0], incomplete)
    if incomplete.startswith("-"):
        options = {**command["options"], "--help": ["flag", "Show this message and exit."]}
        return [("plain", each, text) for each, (_, text) in options.items() if each.startswith(incomplete)]
    if "commands" in command:
        below = ((each, tree[f"{name} {each}".strip()]["help"]) for each in command["commands"])
        return [("plain", each, text) for each, text in below if each.startswith(incomplete)]
    arguments = command["arguments"]
    return _values(arguments[min(count, len(arguments) - 1)], incomplete) if arguments else []


def _values(values: str | list[str] | None, incomplete: str) -> list[tuple[str, str, str]]:
    known = _devices() if values == "device" else values if isinstance(values, list) else []
    matching = [("plain", each, "") for each in known if each.startswith(incomplete)]
    return matching or ([] if values is None else [("file", incomplete, "")])


def _devices() -> list[str]:
    """List the names of the bundled and the user's profiles, from file names only."""
    package = Path(__file__).parents[1]
    own = Path(os.environ.get("EDGEKIT_HOME") or Path.home() / ".config" / "edgekit") / "profiles"
    folders = [package / "_profiles", package.parent / "profiles", own]
    return ["this", "this-cpu", *sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})]


def _words(shell: str, environment: dict[str, str]) -> tuple[list[str], str]:
    """Return the words before the cursor, without the program's name, and the incomplete word."""
    from shlex import split

    text = environment.get("COMP_WORDS", "")
    try:
        words = split(text)
    except ValueError:
        words = text.split()
    if shell == "fish":
        incomplete = environment.get("COMP_CWORD", "")
        words = words[1:]
        return (words[:-1] if incomplete and words and words[-1] == incomplete else words), incomplete
    at = int(environment.get("COMP_CWORD", "0"))
    return words[1:at], words[at] if at < len(words) else ""
