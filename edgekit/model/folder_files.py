"""Files of a model's folder, which may hold links and things that are no files."""

from __future__ import annotations

from pathlib import Path

from edgekit.errors import InvalidInput


def checked_file(folder: Path, name: str) -> Path:
    """Return a file of the folder. A link must stay in the folder or, in a hub cache, in the repository."""
    path = folder / name
    try:
        real, home = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "its links lead nowhere"
        raise InvalidInput(f"{path}: cannot be read: {reason}; is {folder} a whole model folder?") from error
    if not real.is_relative_to(hub_repository(home) or home):
        raise InvalidInput(f"{path}: is a link that leaves the model's folder, to {real}; copy the file there instead")
    if not real.is_file():
        raise InvalidInput(f"{path}: not a regular file")
    return path


def hub_repository(folder: Path) -> Path | None:
    """Return the hub cache's repository that `folder` is a snapshot of; None outside a hub cache."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent
    return None
