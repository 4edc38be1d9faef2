"""`edgekit store`: lists and removes the files of edgekit's cache."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import click
from pydantic import Field

from edgekit.artifact.artifact import read_manifest
from edgekit.cli._console import draw
from edgekit.cli._options import json_option, options
from edgekit.common.base import Frozen
from edgekit.common.content_store import IN_USE, ContentStore
from edgekit.common.files import home
from edgekit.common.options import ByteCount
from edgekit.common.parsing import read_text
from edgekit.common.units import show_bytes
from edgekit.contracts.manifest import MANIFEST
from edgekit.contracts.neutral import MANIFEST as WEIGHTS, read_manifest as read_weights
from edgekit.errors import EdgekitError, InvalidInput

_KEY = re.compile(r"\.?([0-9a-f]{32,64})(?:\.part|\.gone)?")
_DAY_S = 86_400
# Subfolders of the cache, with a description of each.
_KINDS = {
    "artifacts": "artifacts that run, chat and serve made",
    "weights": "neutral weights",
    "programs": "programs that targets built",
    "packed": "weights packed for this processor",
    "reference": "logits of float models",
    "peers": "models of other engines, for bench --against",
    "gguf": "config and tokenizer of GGUF files",
    "native": "builds of the native library",
    "real-models": "downloaded models",
    "facts": "what was measured and checked of artifacts",
    "hashes": "hashes of models' files",
    "quality": "measured quality of recipes",
}
_SMALL = ("facts", "hashes", "quality")  # thousands of small files: one entry each


class Entry(NamedTuple):
    """One folder of the store."""

    kind: str
    path: Path
    bytes: int
    used_at: float  # seconds since the epoch

    @property
    def key(self) -> str:
        match = _KEY.fullmatch(self.path.name)
        return match[1] if match else self.path.name.lstrip(".")

    def describe(self) -> str:
        """Describe the contents of an entry."""
        if self.path.name.startswith("."):
            return "unfinished"
        try:
            if (self.path / WEIGHTS).is_file():
                manifest = read_weights(self.path)
                return f"{manifest.model.name} {manifest.recipe.name} {manifest.method}"
            if (self.path / "model.txt").is_file():
                return f"{read_text(self.path / 'model.txt', 1 << 10)}, packed for this processor"
            for folder in (self.path, self.path / "artifact"):
                if (folder / MANIFEST).is_file():
                    plan = read_manifest(folder).plan
                    return f"{plan.model.name} {plan.built_as}"
        except EdgekitError:
            return "damaged"
        return _KINDS[self.kind]


class PruneOptions(Frozen):
    """Which entries to remove."""

    older_than: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Remove entries that were not used for this many days."
    )
    keep: Annotated[ByteCount, Field(ge=0)] | None = Field(
        default=None, description="Remove the least recently used entries until this much is left, e.g. 10GiB."
    )
    all: bool = Field(default=False, description="Remove every entry.")
    dry_run: bool = Field(default=False, description="Only list what would be removed.")


@click.group(name="store")
def command() -> None:
    """List and remove the files of edgekit's cache. All of them can be made again."""


@command.command()
@json_option("One JSON object a line.")
def ls(as_json: bool) -> None:
    """List the entries, the most recently used first."""
    kept = entries()
    if as_json:
        for each in kept:
            click.echo(json.dumps(_facts(each)))
        return
    if kept:
        head = ("key", "kind", "size", "used", "holds")
        draw(head, [(each.key[:12], each.kind, show_bytes(each.bytes), _ago(each), each.describe()) for each in kept])
    noun = "entry" if len(kept) == 1 else "entries"
    click.echo(f"{len(kept)} {noun}, {show_bytes(sum(each.bytes for each in kept))} in {home()}")


@command.command()
@click.argument("key")
@json_option("JSON instead of text.")
def show(key: str, as_json: bool) -> None:
    """Show the entry whose key begins with KEY: its folder, its files and their sizes."""
    entry = _one(key)
    files = {path.relative_to(entry.path.parent).as_posix(): path.stat().st_size for path in _files(entry.path)}
    if as_json:
        click.echo(json.dumps({**_facts(entry), "files": files}, indent=1))
        return
    click.echo(f"{entry.describe()} ({entry.kind}: {_KINDS[entry.kind]})")
    click.echo(f"  {entry.path}")
    click.echo(f"  {show_bytes(entry.bytes)}, last used {_ago(entry)}")
    for name, size in sorted(files.items()):
        click.echo(f"  {show_bytes(size):>9}  {name}")


@command.command()
@click.argument("keys", nargs=-1)
@options(choice=PruneOptions)
def prune(keys: tuple[str, ...], choice: PruneOptions) -> None:
    """Remove the entries of KEYS, or the ones that the options choose. Artifacts outside the cache are not touched."""
    if not keys and not choice.model_fields_set - {"dry_run"}:
        raise InvalidInput("nothing to remove was named; give a KEY, --older-than DAYS, --keep SIZE or --all")
    named = {_one(key).path for key in keys}
    kept = sorted(entries(), key=lambda each: each.used_at)
    oldest = time.time() - (choice.older_than or 0) * _DAY_S
    left = sum(each.bytes for each in kept)
    freed = 0
    busy: list[str] = []
    failed: list[str] = []
    for each in kept:
        is_old = choice.older_than is not None and each.used_at < oldest
        is_over = choice.keep is not None and left > choice.keep
        if not (each.path in named or choice.all or is_old or is_over):
            continue
        reason = "" if choice.dry_run else ContentStore(each.path.parent).drop(each.path)
        if reason:
            (busy if reason == IN_USE and each.path not in named else failed).append(f"{each.key[:12]} ({reason})")
            continue
        left, freed = left - each.bytes, freed + each.bytes
        click.echo(
            f"{'would remove' if choice.dry_run else 'removed'} {each.key[:12]} {each.kind} {show_bytes(each.bytes)}"
        )
    if not choice.dry_run:
        for root in (home(), *(home() / kind for kind in _KINDS)):
            ContentStore(root).remove_stale_locks()
    click.echo(f"{show_bytes(freed)} {'would be ' if choice.dry_run else ''}freed")
    if busy:
        click.echo(f"left {', '.join(busy)}; prune again when it has ended")
    if failed:
        raise InvalidInput(f"not removed: {', '.join(failed)}; prune again later, or as the user who owns {home()}")


def entries() -> list[Entry]:
    """Return every entry of the cache, the most recently used first."""
    result = []
    for kind, path in _paths():
        with suppress(FileNotFoundError):  # another process is removing it
            size = sum(file.stat().st_size for file in _files(path))
            result.append(Entry(kind, path, size, path.stat().st_mtime))
    return sorted(result, key=lambda each: -each.used_at)


def _paths() -> Iterator[tuple[str, Path]]:
    """Yield the kind and path of every entry; entries that a killed process left unfinished or half removed too."""
    for kind in _KINDS:
        folder = home() / kind
        if kind in _SMALL:
            yield from ((kind, path) for path in (folder, home() / f".{kind}.gone") if path.is_dir())
        elif folder.is_dir():
            yield from ((kind, path) for path in folder.iterdir() if path.suffix != ".lock")
    yield from (("real-models", path) for path in home().glob(".fetching.*"))


def _files(folder: Path) -> Iterator[Path]:
    paths = folder.rglob("*") if folder.is_dir() else (folder,)
    return (path for path in paths if path.is_file() and not path.is_symlink())


def _one(key: str) -> Entry:
    matching = [each for each in entries() if key and each.key.lower().startswith(key.lower())]
    if len(matching) != 1:
        raise InvalidInput(
            f"key {key!r}: {len(matching) or 'no'} entries begin with it; `edgekit store ls` lists the keys"
        )
    return matching[0]


def _facts(entry: Entry) -> dict[str, object]:
    used = datetime.fromtimestamp(entry.used_at, UTC).isoformat(timespec="seconds")
    return {
        "key": entry.key,
        "kind": entry.kind,
        "bytes": entry.bytes,
        "used": used,
        "holds": entry.describe(),
        "path": str(entry.path),
    }


def _ago(entry: Entry) -> str:
    seconds = time.time() - entry.used_at
    units = {"days": _DAY_S, "h": 3600, "min": 60}
    return next((f"{seconds / each:.0f} {unit} ago" for unit, each in units.items() if seconds >= 2 * each), "now")
