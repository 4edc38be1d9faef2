"""Calibration text: plain text, chats or tokens, packed into token sequences of one length.

The caller passes the function that renders chats, because chat templates belong to the runtime.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edgekit.common.footprint import return_unused
from edgekit.common.parsing import parse_json, read_bytes, read_json
from edgekit.contracts.neutral import CalibrationFact
from edgekit.errors import InvalidInput, quote_short, vendor_errors
from edgekit.model.families import model_from_config
from edgekit.model.tokenizer_file import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEQUENCES = 24
MAX_SEQUENCES = 512
LENGTH = 512
MAX_FILE_BYTES = 256 << 20
MIN_TOKENS = 64

Render = Callable[[Sequence[Any]], str]  # chat messages → the prompt in the model's own format


class Calibration(NamedTuple):
    """Token sequences of one length, their description for the manifest, and warnings for the user."""

    sequences: tuple[tuple[int, ...], ...]
    fact: CalibrationFact
    warnings: tuple[str, ...] = ()


class Document(NamedTuple):
    """A text; a rendered chat holds its special tokens already."""

    text: str
    is_chat: bool


def default_text() -> Path:
    """Return the bundled corpus: chats, prose and code in several languages (its README names the sources)."""
    return Path(__file__).with_name("calibration_text") / "corpus.jsonl"


def read_calibration(
    path: Path | None,
    model_folder: Path,
    *,
    vocabulary: int | None = None,
    sequences: int = SEQUENCES,
    length: int = LENGTH,
    render: Render | None = None,
) -> Calibration:
    """Read at most `sequences` sequences of `length` tokens from `path` (None: the bundled corpus).

    `.npy` holds tokens; a line of `.jsonl` holds `{"text": ...}` or `{"messages": [...]}`; other files are text. Each
    sequence of text begins with the tokenizer's bos token if it has one.
    """
    if not 1 <= sequences <= MAX_SEQUENCES or length < 2:
        raise InvalidInput(f"calibration takes 1 to {MAX_SEQUENCES} sequences of at least 2 tokens")
    place = path or default_text()
    warnings: list[str] = []
    begin: list[int] = []
    if place.suffix == ".npy":
        stream = _tokens(place)
    else:
        documents = list(_documents(place, render if path else _lenient(render)))
        tokenizer = _tokenizer(model_folder)
        begin = _bos(tokenizer)
        stream = _stream(documents, tokenizer, begin)
        del tokenizer
        return_unused()
        if path and (warning := _unlike_chat(documents, model_folder)):
            warnings.append(warning)
    if stream.size < MIN_TOKENS:
        raise InvalidInput(f"{place}: {stream.size} tokens; at least {MIN_TOKENS} are needed to calibrate")
    if vocabulary is None:
        config = model_folder / "config.json"
        vocabulary = model_from_config(read_json(config), model_folder.name, str(config)).vocab_size
    highest = max(int(stream.max()), *begin, 0)
    if stream.min() < 0 or highest >= vocabulary:
        raise InvalidInput(
            f"{place}: token {highest} is outside the vocabulary of {vocabulary}; is it another model's text?"
        )
    packed = _packed(stream, sequences, length, begin)
    if len(packed) < sequences:
        warnings.append(f"{place.name} fills {len(packed)} of {sequences} sequences; more text calibrates better")
    fact = CalibrationFact(
        sha256=hashlib.sha256(packed.astype("<i4").tobytes() + repr(packed.shape).encode()).hexdigest(),
        description=f"{'default text' if path is None else place.name}, {packed.shape[0]} × {packed.shape[1]} tokens",
        sequences=packed.shape[0],
        tokens=int(packed.size),
    )
    return Calibration(tuple(tuple(row) for row in packed.tolist()), fact, tuple(warnings))


def _packed(stream: np.ndarray[Any, Any], sequences: int, length: int, begin: list[int]) -> np.ndarray[Any, Any]:
    """Cut sequences evenly spread over the stream and put `begin` before each."""
    width = min(length - len(begin), stream.size)
    available = stream.size // width
    chosen = np.linspace(0, available - 1, min(sequences, available)).round().astype(np.int64)
    rows = stream[: available * width].reshape(available, width)[chosen]
    return np.concatenate([np.tile(np.array(begin, np.int64), (len(rows), 1)), rows], axis=1)


def _lenient(render: Render | None) -> Render:
    """Return a renderer of bundled chats that falls back to plain text without a template, or if the template fails."""

    def text(messages: Sequence[Any]) -> str:
        try:
            if render is not None:
                return render(messages)
        except InvalidInput:
            pass
        return plain_chat(messages)

    return text


def plain_chat(messages: Sequence[Any]) -> str:
    """Render a chat as plain text, each message after its role."""
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages)


def _tokens(path: Path) -> np.ndarray[Any, Any]:
    read_bytes(path, MAX_FILE_BYTES)  # a regular file, and not too large
    try:
        # Mapping refuses a file that is shorter than its header says before anything is allocated.
        array: np.ndarray[Any, Any] = np.load(path, allow_pickle=False, mmap_mode="r")
    except (ValueError, OSError, EOFError, OverflowError, SyntaxError) as error:
        raise InvalidInput(f"{path}: not a numpy file of tokens: {error}") from error
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
        raise InvalidInput(
            f"{path}: holds {array.dtype} of shape {array.shape}; whole numbers in one or two dimensions"
        )
    return array.reshape(-1).astype(np.int64)


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
        item = parse_json(line, where)
        if isinstance(item.get("text"), str):
            yield Document(item["text"], is_chat=False)
        elif isinstance(item.get("messages"), list):
            if render is None:
                raise InvalidInput(f"{where}: holds messages, and the model has no chat template to write them with")
            yield Document(render(item["messages"]), is_chat=True)
        else:
            raise InvalidInput(f"{where}: needs `text` or `messages`, found {quote_short(sorted(item))}")


def bundled_documents() -> Iterator[Document]:
    """Yield the texts of the bundled corpus, chats as plain text."""
    return _documents(default_text(), plain_chat)


def encode(documents: Iterable[Document], folder: Path) -> np.ndarray[Any, Any]:
    """Encode documents into one stream of tokens, each plain text with the tokenizer's own special tokens."""
    tokenizer = _tokenizer(folder)
    ids = [_ids(tokenizer, text, special=not is_chat) for text, is_chat in documents]
    del tokenizer
    return_unused()
    return np.array([token for each in ids for token in each], np.int64)


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidInput(f"{folder}: has no tokenizer.json; calibrate with a .npy file of tokens instead")
    tokenizer = read_tokenizer(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _bos(tokenizer: Tokenizer) -> list[int]:
    """Return the token that the tokenizer puts before every text, if any."""
    empty, some = _ids(tokenizer, "")[:1], _ids(tokenizer, "a")[:1]
    return empty if empty == some else []


def _ids(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    """Return the tokens of a text. Raises `TargetFailed` where the library fails with this tokenizer."""
    with vendor_errors("tokenizers"):
        return list(tokenizer.encode(text, add_special_tokens=special).ids)


def _stream(documents: Sequence[Document], tokenizer: Tokenizer, begin: list[int]) -> np.ndarray[Any, Any]:
    """Concatenate all documents without bos, which belongs only before whole sequences."""
    ids: list[int] = []
    for document in documents:
        encoded = _ids(tokenizer, document.text, special=False)
        ids += encoded[len(begin) :] if begin and encoded[: len(begin)] == begin else encoded
    return np.array(ids, np.int64)


def _unlike_chat(documents: Sequence[Document], folder: Path) -> str | None:
    """Return a warning if the model has a chat template and the text holds none of its special tokens."""
    marks = _chat_marks(folder)
    if not marks or any(document.is_chat or any(mark in document.text for mark in marks) for document in documents):
        return None
    return (
        f"the model has a chat template and the calibration text holds none of its marks ({', '.join(marks[:3])}); "
        'give jsonl with {"messages": [...]} if it will be used to chat'
    )


def _chat_marks(folder: Path) -> list[str]:
    """Return the special tokens that the chat template writes."""
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
