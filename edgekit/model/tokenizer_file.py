"""Load a `tokenizer.json` that may be hostile.

The `tokenizers` library trusts several things in it. A merge whose right part lacks the prefix of continued words makes
text that is not UTF-8, which ends the whole process. Replacements that lengthen a text can be chained until it fills
the memory. A template that names unknown tokens panics at the first text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit.common.parsing import read_bytes, read_json, read_text
from edgekit.errors import InvalidInput, TargetFailed, quote_short, vendor_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKENIZER_BYTES = 128 << 20
MAX_TEMPLATE_BYTES = 1 << 20
_MAX_PARTS, _MAX_GROWTH = 64, 256  # one that writes a space as three bytes and a line break as six has 18

_PREFIX = "continuing_subword_prefix"
_NAME, _VALUE = f'"{_PREFIX}"'.encode(), re.compile(rb'\s*+:\s*+(?!null|"")')
_ESCAPED_LETTER = re.compile(rb"\\u00[5-7]")  # may spell the name of a field


def read_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer from its file."""
    return load_tokenizer(read_bytes(path, MAX_TOKENIZER_BYTES), str(path))


def check_small_files(paths: Iterable[Path]) -> None:
    """Read the config and the template among a model's files, so that a damaged one is refused before any work."""
    for path in paths:
        if path.name == "tokenizer_config.json":
            read_json(path)
        elif path.suffix == ".jinja":
            read_text(path, MAX_TEMPLATE_BYTES)


def load_tokenizer(data: bytes, where: str) -> Tokenizer:
    """Load a tokenizer; `where` names it in errors."""
    from tokenizers import Tokenizer

    # Most tokenizers have no such prefix. To parse a large file only for this would take half a second.
    if _has_prefix(data) or _ESCAPED_LETTER.search(data):
        _check_merges(data, where)
    try:
        with vendor_errors("tokenizers"):
            tokenizer: Tokenizer = Tokenizer.from_buffer(data)
            _keep_no_words(tokenizer)
    except TargetFailed as error:
        raise InvalidInput(f"{where}: not a tokenizer: {str(error)[:200]}; export or download it again") from error
    for stage in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder):
        if stage is not None:
            _check_growth(json.loads(stage.__getstate__()), where)
    if tokenizer.post_processor is not None:
        _check_templates(json.loads(tokenizer.post_processor.__getstate__()), where)
    return tokenizer


def _keep_no_words(tokenizer: Tokenizer) -> None:
    """Turn off the cache of words of a byte-pair tokenizer.

    The library keeps up to 10,000 words in each thread that encodes, and never frees them, even after the tokenizer
    (0.23): 200 KB for each tokenizer with some hundred words. A long text takes 1.4 times as long without it, 2 µs a
    token.
    """
    from tokenizers.models import BPE

    resize = getattr(tokenizer.model, "_resize_cache", None)  # not part of the library's public interface
    if isinstance(tokenizer.model, BPE) and resize is not None:
        resize(0)


def _has_prefix(data: bytes) -> bool:
    """Return True if any field of a prefix has a value. `find` reads a large file four times as fast as a pattern."""
    index = data.find(_NAME)
    while index >= 0 and not _VALUE.match(data, index + len(_NAME)):
        index = data.find(_NAME, index + 1)
    return index >= 0


def _check_merges(data: bytes, where: str) -> None:
    """Raise unless the right part of every merge begins with the prefix of continued words."""
    try:
        model = json.loads(data, object_pairs_hook=_without_duplicates)["model"]
        prefix, merges = model.get(_PREFIX) or "", model.get("merges") or []
        for merge in merges:
            right = merge.split(" ", 1)[1] if isinstance(merge, str) else merge[1]
            if not right.startswith(prefix):
                raise InvalidInput(
                    f"{where}: not a tokenizer: the right part of the merge {quote_short(merge)} does not begin with "
                    f"{quote_short(prefix)}, the {_PREFIX}"
                )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"{where}: not a tokenizer: {quote_short(str(error))}") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; refuse a repeated field, of which different readers would take different values."""
    read = dict(pairs)
    if len(read) < len(pairs):
        raise ValueError("a field stands twice in one object")
    return read


def _check_growth(stage: dict[str, Any], where: str) -> None:
    """Raise if a stage has too many steps, or makes a text much longer."""
    steps = _steps(stage)
    if len(steps) > _MAX_PARTS:
        raise InvalidInput(f"{where}: a stage of {len(steps):,} steps; at most {_MAX_PARTS} are run")
    growth = math.prod(_growth(step) for step in steps)
    if growth > _MAX_GROWTH:
        raise InvalidInput(f"{where}: can make a text {growth:.3g} times as long; at most {_MAX_GROWTH} are allowed")


def _check_templates(stage: dict[str, Any], where: str) -> None:
    """Raise if a template puts a token around texts that it does not define."""
    for step in _steps(stage):
        if step["type"] == "TemplateProcessing":
            placed = {
                piece["SpecialToken"]["id"] for piece in [*step["single"], *step["pair"]] if "SpecialToken" in piece
            }
            if unknown := placed - step["special_tokens"].keys():
                raise InvalidInput(
                    f"{where}: not a tokenizer: its template names {quote_short(min(unknown))}, which it lacks"
                )


def _steps(stage: dict[str, Any]) -> list[dict[str, Any]]:
    if stage["type"] != "Sequence":
        return [stage]
    parts = next(value for value in stage.values() if isinstance(value, list))
    return [step for part in parts for step in _steps(part)]


def _growth(step: dict[str, Any]) -> float:
    """Return by how much a step can lengthen a text. Most steps add at most a constant."""
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String", "")  # a regular expression may match nothing, before every character
        added = len(step["content"].encode())
        return max(1.0, added / len(replaced.encode()) if replaced else added + 1)
    if step["type"] == "Prepend":  # before a text of one byte
        return len(step["prepend"].encode()) + 1.0
    return 2.0 if step["type"] == "ByteLevel" else 1.0  # each byte that is not ASCII becomes two
