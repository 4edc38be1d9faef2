"""The text on which integers are chosen: plain text, chats, or tokens, packed into sequences of one length.

Chats are rendered by whoever reads the model's template; this module only asks for it. It knows nothing of weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgekit.errors import InvalidInput, clip
from edgekit.families import model_from_config
from edgekit.reading import parse_json, read_bytes, read_json
from edgekit.weights.neutral import CalibrationFact

SEQUENCES = 128
MAX_SEQUENCES = 512
LENGTH = 512
MAX_FILE_BYTES = 256 << 20
MIN_TOKENS = 64

Render = Callable[[Sequence[Any]], str]  # chat messages → the text that the model was trained on


class Calibration(NamedTuple):
    """Token sequences of one length, what they are, and what was odd about them."""

    sequences: tuple[tuple[int, ...], ...]
    fact: CalibrationFact
    warnings: tuple[str, ...] = ()


class Document(NamedTuple):
    """A text; a rendered chat holds its special tokens already."""

    text: str
    is_chat: bool


def default_text() -> Path:
    """The small corpus that comes with edgekit."""
    return Path(__file__).parents[1] / "_demo" / "calibration.txt"


def read_calibration(
    path: Path | None,
    model_folder: Path,
    *,
    vocabulary: int | None = None,
    sequences: int = SEQUENCES,
    length: int = LENGTH,
    render: Render | None = None,
) -> Calibration:
    """At most `sequences` sequences of `length` tokens from `path` (None: the text that comes with edgekit).

    `.npy` holds tokens; `.jsonl` holds `{"text": ...}` or `{"messages": [...]}` a line; anything else is text.
    """
    if not 1 <= sequences <= MAX_SEQUENCES or length < 2:
        raise InvalidInput(f"calibration takes 1 to {MAX_SEQUENCES} sequences of at least 2 tokens")
    place = path or default_text()
    warnings: list[str] = []
    if place.suffix == ".npy":
        stream = _tokens(place)
    else:
        documents = list(_documents(place, render))
        stream = encode(documents, model_folder)
        if warning := _unlike_chat(documents, model_folder):
            warnings.append(warning)
    if stream.size < MIN_TOKENS:
        raise InvalidInput(f"{place}: {stream.size} tokens; at least {MIN_TOKENS} are needed to calibrate")
    if vocabulary is None:
        config = model_folder / "config.json"
        vocabulary = model_from_config(read_json(config), model_folder.name, str(config)).vocab_size
    if stream.min() < 0 or stream.max() >= vocabulary:
        raise InvalidInput(
            f"{place}: token {int(stream.max())} is outside the vocabulary of {vocabulary}; is it another model's text?"
        )
    packed = _packed(stream, sequences, length)
    if len(packed) < sequences:
        warnings.append(f"{place.name} fills {len(packed)} of {sequences} sequences; more text calibrates better")
    fact = CalibrationFact(
        sha256=hashlib.sha256(packed.astype("<i4").tobytes() + repr(packed.shape).encode()).hexdigest(),
        description=f"{'default text' if path is None else place.name}, {packed.shape[0]} × {packed.shape[1]} tokens",
        sequences=packed.shape[0],
        tokens=int(packed.size),
    )
    return Calibration(tuple(tuple(row) for row in packed.tolist()), fact, tuple(warnings))


def _packed(stream: np.ndarray[Any, Any], sequences: int, length: int) -> np.ndarray[Any, Any]:
    """Whole sequences, evenly spread over the stream."""
    length = min(length, stream.size)
    available = stream.size // length
    chosen = np.linspace(0, available - 1, min(sequences, available)).round().astype(np.int64)
    return stream[: available * length].reshape(available, length)[chosen]


def _tokens(path: Path) -> np.ndarray[Any, Any]:
    read_bytes(path, MAX_FILE_BYTES)  # a regular file, and not too large
    try:
        # Mapped, a file that claims to hold more than it does is refused before anything is allocated.
        found: np.ndarray[Any, Any] = np.load(path, allow_pickle=False, mmap_mode="r")
    except (ValueError, OSError, EOFError, OverflowError, SyntaxError) as error:
        raise InvalidInput(f"{path}: not a numpy file of tokens: {error}") from error
    if found.ndim not in (1, 2) or found.dtype.kind not in "iu":
        raise InvalidInput(
            f"{path}: holds {found.dtype} of shape {found.shape}; whole numbers in one or two dimensions"
        )
    return found.reshape(-1).astype(np.int64)


def _documents(path: Path, render: Render | None) -> Iterator[Document]:
    data = read_bytes(path, MAX_FILE_BYTES)
    if path.suffix != ".jsonl":
        try:
            yield Document(data.decode(), is_chat=False)
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{path}: not text in UTF-8: {error}") from error
        return
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        found = parse_json(line, where)
        if isinstance(found.get("text"), str):
            yield Document(found["text"], is_chat=False)
        elif isinstance(found.get("messages"), list):
            if render is None:
                raise InvalidInput(f"{where}: holds messages, and the model has no chat template to write them with")
            yield Document(render(found["messages"]), is_chat=True)
        else:
            raise InvalidInput(f"{where}: needs `text` or `messages`, found {clip(sorted(found))}")


def encode(documents: Sequence[Document], folder: Path) -> np.ndarray[Any, Any]:
    """One stream of tokens, every plain text with the marks that the tokenizer puts around it."""
    from tokenizers import Tokenizer

    place = folder / "tokenizer.json"
    if not place.is_file():
        raise InvalidInput(f"{folder}: has no tokenizer.json; calibrate with a .npy file of tokens instead")
    tokenizer = Tokenizer.from_file(str(place))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids: list[int] = []
    for text, is_chat in documents:
        ids += tokenizer.encode(text, add_special_tokens=not is_chat).ids
    return np.array(ids, np.int64)


def _unlike_chat(documents: Sequence[Document], folder: Path) -> str | None:
    """A warning where a chat model would be calibrated on text in which nobody speaks."""
    marks = _chat_marks(folder)
    if not marks or any(document.is_chat or any(mark in document.text for mark in marks) for document in documents):
        return None
    return (
        f"the model has a chat template and the calibration text holds none of its marks ({', '.join(marks[:3])}); "
        'give jsonl with {"messages": [...]} if it will be used to chat'
    )


def _chat_marks(folder: Path) -> list[str]:
    """Special tokens that stand in the chat template."""
    template = folder / "chat_template.jinja"
    settings = folder / "tokenizer_config.json"
    text = read_bytes(template, 1 << 20).decode(errors="replace") if template.is_file() else ""
    if not text and settings.is_file():
        stated = parse_json(read_bytes(settings, 32 << 20), str(settings)).get("chat_template", "")
        text = stated if isinstance(stated, str) else json.dumps(stated)
    tokenizer = folder / "tokenizer.json"
    if not text or not tokenizer.is_file():
        return []
    added = parse_json(read_bytes(tokenizer, 64 << 20), str(tokenizer)).get("added_tokens") or []
    marks = [token.get("content", "") for token in added if isinstance(token, dict) and token.get("special")]
    return [mark for mark in marks if isinstance(mark, str) and mark and mark in text]
