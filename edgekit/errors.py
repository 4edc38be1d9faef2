"""Every error that edgekit raises on purpose.

EdgekitError
├── InvalidInput          a file, option or request that cannot be used; says where, what and the cure
│   ├── UnknownName       a target, profile, recipe or model that nobody offers; lists the known ones
│   ├── DamagedArtifact   bytes that are not what their manifest says; make or copy them again
│   ├── ContextExceeded   the prompt does not fit the context; carries both numbers
│   └── LimitExceeded     untrusted input that ran past its time, size or depth
├── Unsupported           understood, and refused by name: nothing is silently ignored
├── DoesNotFit            no option fits; carries the table of bytes (exit code 3)
├── OutOfSpace            the disk is full; carries the bytes needed
├── TargetMissing         the vendor library is absent or clashes; carries the cure
├── TargetFailed          the vendor library raised; carries its error as the cause
├── Cancelled             somebody asked to stop
└── DeviceFailed          a machine of the lab did not answer as it should
    ├── DeviceUnreachable     it may come back: try again later
    ├── DeviceTimeout         it took longer than it was given
    └── WorkloadFailed        it answered, and the answer is an error

A class exists only where a caller would act differently. A message says what happened, with the value, and what to
do. `assert` is for our own invariants alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class EdgekitError(Exception):
    """Anything that edgekit raises on purpose; the command line prints it as one line and exits with `exit_code`."""

    exit_code = 2


class InvalidInput(EdgekitError):
    """A file, option or request that cannot be used."""


class UnknownName(InvalidInput):
    """A name that nobody offers."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        super().__init__(f"unknown {kind} {clip(name)}; known: {', '.join(self.known) or 'none'}")


class DamagedArtifact(InvalidInput):
    """Bytes that are not what their manifest says."""


class ContextExceeded(InvalidInput):
    """The prompt does not fit the context."""

    def __init__(self, prompt_tokens: int, room_tokens: int, cure: str) -> None:
        self.prompt_tokens, self.room_tokens = prompt_tokens, room_tokens
        super().__init__(f"the prompt has {prompt_tokens} tokens and there is room for {room_tokens}; {cure}")


class LimitExceeded(InvalidInput):
    """Untrusted input that ran past its time, size or depth."""


class Unsupported(EdgekitError):
    """Understood, and refused by name."""


class DoesNotFit(EdgekitError):
    """No option fits; `table` holds the bytes of each, ready to print, and `rejected` the same as data, by device."""

    exit_code = 3

    def __init__(self, message: str, table: str = "", rejected: dict[str, tuple[Any, ...]] | None = None) -> None:
        self.table, self.rejected = table, rejected or {}
        super().__init__(message)


class OutOfSpace(EdgekitError):
    """The disk is full."""

    def __init__(self, path: str, needed_bytes: int, free_bytes: int) -> None:
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        super().__init__(
            f"{path}: {needed_bytes:,} bytes are needed and {free_bytes:,} are free; make room or choose another disk"
        )


class TargetMissing(EdgekitError):
    """The vendor library is absent or clashes with another."""


class TargetFailed(EdgekitError):
    """The vendor library raised."""


class Cancelled(EdgekitError):
    """Somebody asked to stop."""


class DeviceFailed(EdgekitError):
    """A machine of the lab did not answer as it should."""


class DeviceUnreachable(DeviceFailed):
    """It may come back."""


class DeviceTimeout(DeviceFailed):
    """It took longer than it was given."""


class WorkloadFailed(DeviceFailed):
    """It answered, and the answer is an error."""


def clip(value: object, limit: int = 80) -> str:
    """`value` as it may stand in a one-line message: quoted, escaped and short, whatever it was."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


@contextmanager
def vendor_errors(vendor: str) -> Iterator[None]:
    """The one seam through which vendor exceptions pass; ours go through unchanged."""
    try:
        yield
    except EdgekitError:
        raise
    except MemoryError as error:
        raise TargetFailed(f"{vendor}: out of memory; use a smaller context or recipe") from error
    except ImportError as error:
        raise TargetMissing(f"{vendor}: {error}; `edgekit doctor` shows what is installed and the cure") from error
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TargetFailed(f"{vendor}: {lines[0][:300]}") from error
