"""Every error that edgekit raises on purpose.

EdgekitError
├── InvalidInput          a file, option or request that cannot be used
│   ├── UnknownName       no target, profile, recipe, model or adapter has this name; lists the known ones
│   ├── DamagedArtifact   bytes that differ from their manifest; make or copy the artifact again
│   ├── UntrustedSignature    no signature, or none that proves a trusted origin: do not use these bytes
│   ├── RollbackRefused   a site offers an older index or release than was seen before
│   ├── InvalidOption     an option of a request is unknown or out of bounds: a mistake of the program
│   ├── InvalidPrompt     a prompt or messages that cannot be used: ask the user for another
│   │   └── TemplateRefused   the model's chat template refused the messages
│   ├── ContextExceeded   the prompt does not fit the context; carries both numbers
│   └── LimitExceeded     untrusted input exceeded a limit of time, size or depth
├── InvalidAnswer         an answer was cut off before it matched its schema, or its pydantic class refuses it
├── RuntimeClosed         the runtime was closed; open the artifact again
├── Unsupported           valid, but this engine or model cannot do it
├── DoesNotFit            no option fits into memory; carries the table of bytes (exit code 3)
├── OutOfSpace            the disk is full; carries the bytes needed
├── TransferFailed        a site cannot be read now; fetched bytes stay
├── NetworkMetered        bytes are missing and the network is metered; carries their number
├── TargetMissing         the vendor library is not installed or conflicts with another; says what to install
├── TargetFailed          the vendor library raised; its error is the cause
├── Cancelled             the work was interrupted
└── DeviceFailed          a machine of the lab failed
    ├── DeviceUnreachable     try again later
    ├── DeviceTimeout         it exceeded its time limit
    └── WorkloadFailed        it answered with an error

A class exists only if callers would handle it differently. A message says what happened, with the value, and what to
do. `assert` is for internal invariants only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class EdgekitError(Exception):
    """Base of all errors. The command line prints it in one line and exits with `exit_code`."""

    exit_code = 2

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())  # texts of vendors may have several lines


class InvalidInput(EdgekitError):
    """A file, option or request that cannot be used."""


class UnknownName(InvalidInput):
    """No target, profile, recipe, model or adapter has this name; `known` lists the existing names."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        near = near_names(name, self.known)
        hint = f"did you mean {near[0]}? " if near else ""
        super().__init__(f"unknown {kind} {quote_short(name)}; {hint}known: {', '.join(self.known) or 'none'}")


class DamagedArtifact(InvalidInput):
    """Bytes that differ from their manifest."""


class UntrustedSignature(InvalidInput):
    """There is no signature, or none by a trusted signer."""


class RollbackRefused(InvalidInput):
    """A site offers an older index or release than this installation has seen."""


class InvalidOption(InvalidInput):
    """An option of a request is unknown or out of bounds."""


class InvalidPrompt(InvalidInput):
    """A prompt, or a list of messages, that cannot be used."""


class TemplateRefused(InvalidPrompt):
    """The model's chat template refused the messages."""


class ContextExceeded(InvalidInput):
    """The prompt has `prompt_tokens` tokens, and at most `max_tokens` fit.

    A far longer prompt is not read to its end: `prompt_tokens` is then the count or estimate so far, and
    `found` describes the part that was read.
    """

    def __init__(self, prompt_tokens: int, max_tokens: int, fix: str, *, found: str = "") -> None:
        self.prompt_tokens, self.max_tokens = prompt_tokens, max_tokens
        super().__init__(
            f"the prompt has {found or f'{prompt_tokens} tokens'} and there is room for {max_tokens}"
            f"{' tokens' if found else ''}; {fix}"
        )


class LimitExceeded(InvalidInput):
    """Untrusted input exceeded a limit of time, size or depth."""


class InvalidAnswer(EdgekitError):
    """An answer does not match its schema, or the schema's pydantic class refuses it."""


class RuntimeClosed(EdgekitError):
    """The runtime was closed."""


class Unsupported(EdgekitError):
    """Valid, but this engine or model cannot do it."""


class DoesNotFit(EdgekitError):
    """No candidate fits some device. `table` is a printable table of what was tried; `rejected` has it by device."""

    exit_code = 3

    def __init__(self, message: str, table: str = "", rejected: dict[str, Any] | None = None) -> None:
        self.table, self.rejected = table, rejected or {}
        super().__init__(message)


class OutOfSpace(EdgekitError):
    """The disk is full, or `limit` (a quota or a limit on file sizes) is reached."""

    def __init__(self, path: str, needed_bytes: int, free_bytes: int, limit: str | None = None) -> None:
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        if limit is None:
            problem = f"{free_bytes:,} are free; make room or choose another disk"
        else:
            problem = f"{limit} allows fewer; raise it or choose another path"
        super().__init__(f"{path}: {needed_bytes:,} bytes are needed and {problem}")


class TransferFailed(EdgekitError):
    """A transfer failed. Complete chunks stay, and the next transfer continues from there.

    `is_passing`: the same request may succeed soon; `wait_s`: seconds to wait, if the server stated them.
    """

    def __init__(self, message: str, *, is_passing: bool = True, wait_s: float | None = None) -> None:
        self.is_passing, self.wait_s = is_passing, wait_s
        super().__init__(message)


class NetworkMetered(EdgekitError):
    """The network is metered, and `missing_bytes` bytes are missing."""

    def __init__(self, missing_bytes: int) -> None:
        self.missing_bytes = missing_bytes
        super().__init__(f"the network is metered and {missing_bytes:,} bytes are missing; pull again on another one")


class TargetMissing(EdgekitError):
    """The vendor library is not installed, or conflicts with another."""


class TargetFailed(EdgekitError):
    """The vendor library raised."""


class Cancelled(EdgekitError):
    """The work was interrupted."""


class DeviceFailed(EdgekitError):
    """A machine of the lab failed."""


class DeviceUnreachable(DeviceFailed):
    """The machine cannot be reached now; try again later."""


class DeviceTimeout(DeviceFailed):
    """The machine exceeded its time limit."""


class WorkloadFailed(DeviceFailed):
    """The machine answered with an error."""


def near_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names most similar to `name`, best first; case and punctuation are ignored."""
    from difflib import get_close_matches

    plain = {_letters(each): each for each in known}
    return [plain[each] for each in get_close_matches(_letters(name), plain, n=most, cutoff=0.6)]


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def quote_short(value: object, limit: int = 80) -> str:
    """Quote, escape and shorten `value` for a one-line message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def printable(text: str) -> str:
    """Escape what a terminal would obey or hide: control characters and invisible ones, but for line ends and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def vendor_errors(vendor: str) -> Iterator[None]:
    """Convert exceptions of a vendor library to TargetFailed or TargetMissing; EdgekitErrors pass unchanged."""
    try:
        yield
    except EdgekitError:
        raise
    except MemoryError as error:
        raise TargetFailed(f"{vendor}: out of memory; use a smaller context or recipe") from error
    except ImportError as error:
        is_extra = vendor.startswith("edgekit[")
        fix = f"pip install '{vendor}'" if is_extra else "`edgekit doctor` shows what is installed and how to fix it"
        raise TargetMissing(f"{vendor}: {error}; {fix}") from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # a panic of Rust code
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if "Resource temporarily unavailable" in str(error):
            lines = ["no thread could be started: this user's limit is reached (`ulimit -u`)"]
        raise TargetFailed(f"{vendor}: {lines[0][:300]}") from error
