"""Turns documents into training data: one tokenizer, one long row of tokens, a held-out split, a list of sources.

Everything is written into one folder once; a run that goes on finds it there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgekit.common.files import write_file
from examples.training.demo_training.chat import conversations, render
from examples.training.demo_training.corpus import Document, Package, Seen, is_held_out, read_documents
from examples.training.demo_training.llama import BOS, EOS

SPECIAL_TOKENS = ("<|endoftext|>", "<|bos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
HELD_OUT_CHARACTERS = 400_000
# A file of which more was seen before is a copy; one of which more is held out would teach the answers.
_COPY, _LEAK = 0.6, 0.3

Sources = Iterable[tuple[Package, list[tuple[str, Path]]]]


@dataclass(frozen=True)
class Settings:
    """Settings that decide the data; a run continues only with the same settings."""

    vocabulary: int
    max_characters: int | None
    chat_share: float
    held_out_one_in: int
    seed: int
    corpus: str | None = None
    tokenizer: str | None = None
    held_out: str | None = None


def prepare(folder: Path, sources: Sources, settings: Settings) -> None:
    """Write tokenizer.json, train.npy, held_out.jsonl and sources.json into `folder`; the last one says "done"."""
    folder.mkdir(parents=True, exist_ok=True)
    documents, reserved, packages = _split(sources, settings)
    if not documents:
        raise SystemExit("no Python file with a permissive licence was found; name a folder with --corpus")
    if not reserved:
        raise SystemExit(f"no file was held out at one in {settings.held_out_one_in}; give a lower --held-out-one-in")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in reserved)
    write_file(folder / "held_out.jsonl", lines.encode())
    if settings.tokenizer is None:
        trained = train_tokenizer((each.text for each in documents), settings.vocabulary)
        write_file(folder / "tokenizer.json", trained.to_str().encode())
    else:
        write_file(folder / "tokenizer.json", Path(settings.tokenizer).read_bytes())
    rows, chat_tokens = _rows(read_tokenizer(folder), documents, settings)
    np.save(folder / "train.npy", np.concatenate(rows))
    summary = {
        "settings": asdict(settings),
        "files": len(documents),
        "tokens": int(sum(map(len, rows))),
        "chat_tokens": chat_tokens,
        "held_out_files": len(reserved),
        "packages": packages,
    }
    write_file(folder / "sources.json", json.dumps(summary, indent=2).encode())


def read_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def read_texts(path: Path) -> list[str]:
    """The texts of a file of lines `{"text": ...}`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [str(json.loads(line)["text"]) for line in lines]


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE, the special tokens first, so that every text has tokens and every token has bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


def text_tokens(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Plain documents: start, text, end. Special tokens spelt in a text are its characters, nothing more."""
    tokenizer.encode_special_tokens = True
    return [[BOS, *each.ids, EOS] for each in tokenizer.encode_batch(texts, add_special_tokens=False)]


def chat_tokens(tokenizer: Tokenizer, rendered: list[str]) -> list[list[int]]:
    """Conversations as the template wrote them, markers included, then the end of the text."""
    tokenizer.encode_special_tokens = False
    return [[*each.ids, EOS] for each in tokenizer.encode_batch(rendered, add_special_tokens=False)]


def _split(sources: Sources, settings: Settings) -> tuple[list[Document], list[str], list[dict[str, object]]]:
    """Documents to train on in a seeded order, texts to hold out, and what each package gave."""
    reserved = read_texts(Path(settings.held_out)) if settings.held_out else []
    leaks, copies = Seen(), Seen()
    for text in reserved:
        leaks.add(text)
    found = list(read_documents(sources))
    random.Random(settings.seed).shuffle(found)
    if settings.held_out is None:
        size = 0
        for _, document in found:
            if size < HELD_OUT_CHARACTERS and is_held_out(document, settings.held_out_one_in):
                reserved.append(document.text)
                leaks.add(document.text)
                size += len(document.text)
    kept: list[Document] = []
    counts: dict[Package, list[int]] = {}
    budget = settings.max_characters or sum(len(document.text) for _, document in found)
    for package, document in found:
        if settings.held_out is None and is_held_out(document, settings.held_out_one_in):
            continue
        if budget <= 0 or leaks.share(document.text) > _LEAK or copies.share(document.text) > _COPY:
            continue
        copies.add(document.text)
        kept.append(document)
        budget -= len(document.text)
        count = counts.setdefault(package, [0, 0])
        count[0] += 1
        count[1] += len(document.text)
    table = sorted(counts.items(), key=lambda item: -item[1][1])
    packages = [{**asdict(package), "files": files, "characters": size} for package, (files, size) in table]
    return kept, reserved, packages


def _rows(tokenizer: Tokenizer, documents: list[Document], settings: Settings) -> tuple[list[np.ndarray], int]:
    """Token rows of documents and conversations in one seeded order, and how many tokens are of conversations.

    Where there are too few conversations for their share, documents are left out until it holds.
    """
    texts = [row for batch in _batches(documents) for row in text_tokens(tokenizer, [each.text for each in batch])]
    wanted = int(sum(map(len, texts)) * settings.chat_share / (1 - settings.chat_share))
    chats: list[list[int]] = []
    for batch in _batches(documents):
        if wanted <= 0:
            break
        rendered = [render(talk) for each in batch for talk in conversations(each.text)]
        for row in chat_tokens(tokenizer, rendered):
            if wanted > 0:
                chats.append(row)
                wanted -= len(row)
    if wanted > 0 and settings.chat_share > 0:
        texts = _first(texts, int(sum(map(len, chats)) * (1 - settings.chat_share) / settings.chat_share))
    mixed = [np.array(row, dtype=np.uint16) for row in [*texts, *chats]]
    random.Random(settings.seed + 1).shuffle(mixed)
    return mixed, sum(map(len, chats))


def _first(rows: list[list[int]], tokens: int) -> list[list[int]]:
    """Return the first rows up to this number of tokens, and at least one."""
    ends = np.cumsum([len(row) for row in rows])
    return rows[: max(1, int(np.searchsorted(ends, tokens, side="right")))]


def _batches(documents: list[Document], size: int = 64) -> Iterator[list[Document]]:
    for start in range(0, len(documents), size):
        yield documents[start : start + size]
