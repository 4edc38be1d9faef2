"""Whether two tokenizers mean the same by every token: compared by content, never by file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgekit.errors import InvalidInput, clip
from edgekit.reading import read_bytes
from edgekit.runtime.text import MAX_TOKENIZER_BYTES


def check_same_vocabulary(target: Path, draft: Path) -> None:
    """Refuses with the first token, merge or added token that differs."""
    one, other = (_content(folder) for folder in (target, draft))
    for what, (mine, theirs) in {name: (one[name], other[name]) for name in one}.items():
        if mine == theirs:
            continue
        if what == "kind of vocabulary":
            found = f"is {clip(theirs)}, the target's is {clip(mine)}"
        elif isinstance(mine, dict) and isinstance(theirs, dict):
            differs = min(id_ for id_ in mine.keys() | theirs.keys() if mine.get(id_) != theirs.get(id_))
            found = f"at {differs}: {_shown(theirs.get(differs))}, the target has {_shown(mine.get(differs))}"
        else:
            place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            found = f"{len(theirs)} of them, the target has {len(mine)}" if place is None else f"differ at {place}"
        raise InvalidInput(
            f"draft {draft}: its {what} {found}; a draft needs the target's vocabulary, merges and added tokens"
        )


def _shown(value: object) -> str:
    return "nothing" if value is None else clip(value)


def _id(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{clip(value)} is not an id")
    return value


def _content(folder: Path) -> dict[str, Any]:
    """What turns text into ids and ids into text."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise InvalidInput(f"draft {folder}: holds no tokenizer.json to compare with the target's")
    try:
        tree = json.loads(read_bytes(path, MAX_TOKENIZER_BYTES))
        model = tree["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            tokens = {_id(id_): token for token, id_ in vocabulary.items()}
        else:
            tokens = {id_: piece[0] for id_, piece in enumerate(vocabulary)}
        added = {_id(each["id"]): each["content"] for each in tree.get("added_tokens") or []}
        # Files write a merge as one string or as two; a token never holds the space between them.
        merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model.get("merges") or []]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"{path}: not a tokenizer: {clip(str(error))}") from error
    return {
        "kind of vocabulary": str(model.get("type")),
        "tokens": {**tokens, **added},
        "merges": merges,
        "added tokens": added,
    }
