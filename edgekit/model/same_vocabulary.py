"""Compare the vocabularies of two tokenizers by content, not by file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgekit.common.parsing import read_bytes
from edgekit.errors import InvalidInput, quote_short
from edgekit.model.tokenizer_file import MAX_TOKENIZER_BYTES


def check_same_vocabulary(target: Path, draft: Path) -> None:
    """Refuse a draft with another vocabulary; the error names the first token, merge or added token that differs."""
    target_content, draft_content = _content(target), _content(draft)
    for name, mine in target_content.items():
        theirs = draft_content[name]
        if mine == theirs:
            continue
        if name == "kind of vocabulary":
            difference = f"is {quote_short(theirs)}, the target's is {quote_short(mine)}"
        elif isinstance(mine, dict) and isinstance(theirs, dict):
            differs = min(id_ for id_ in mine.keys() | theirs.keys() if mine.get(id_) != theirs.get(id_))
            difference = f"at {differs}: {_shown(theirs.get(differs))}, the target has {_shown(mine.get(differs))}"
        else:
            place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            difference = f"{len(theirs)} of them, the target has {len(mine)}" if place is None else f"differ at {place}"
        raise InvalidInput(
            f"draft {draft}: its {name} {difference}; a draft needs the target's vocabulary, merges and added tokens"
        )


def _shown(value: object) -> str:
    return "nothing" if value is None else quote_short(value)


def _id(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{quote_short(value)} is not an id")
    return value


def _content(folder: Path) -> dict[str, Any]:
    """Read everything that maps text to ids and ids to text."""
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
        # Files have a merge as one string or as two; no token contains a space.
        merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model.get("merges") or []]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"{path}: not a tokenizer: {quote_short(str(error))}") from error
    return {
        "kind of vocabulary": str(model.get("type")),
        "tokens": {**tokens, **added},
        "merges": merges,
        "added tokens": added,
    }
