"""The crash guard: notes in a file what the process is about to do, so that the next start can tell if it died.

A system kills a process that takes too much memory without notice. The guard writes its file before an opening, before
the first request and after its first tokens. After two starts in a row that did not finish, killed or by an error, the
third opens a smaller setting. Each further failure opens the next smaller one, at last the former artifact of a pull.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from edgekit.artifact.artifact import Artifact, open_artifact, read_manifest
from edgekit.common.base import Frozen
from edgekit.common.bounds import Count, Sha256, Text, Version
from edgekit.common.files import write_file
from edgekit.common.log import log
from edgekit.common.parsing import read_bytes, validate
from edgekit.contracts.installed import folder_of, read_installed
from edgekit.errors import EdgekitError, InvalidInput
from edgekit.runtime.open_options import OpenOptions

_FORMAT = 1
_MAX_BYTES = 64 << 10
_FEWEST_TOKENS = 256
FAILURES_ALLOWED = 1  # a user who kills the app looks like a crash
SAFE_TOKENS = 8  # tokens to generate before a start counts as successful


class GuardRecord(Frozen):
    """The last start, as stored in the file."""

    version: Version = _FORMAT
    artifact: Sha256
    step: Annotated[int, Field(ge=0, le=100)] = 0  # index in `settings_of`
    state: Literal["opening", "open", "first tokens", "ended well"] = "opening"  # dying while "open" is no failure
    failures: Count = 0  # failed starts in a row
    note: Text = ""  # why a smaller setting was opened


class GuardedSetting(NamedTuple):
    """A setting to open an artifact with. Each takes less memory than the one before it."""

    folder: Path
    tokens: int | None  # limit of the context, or of the window if the artifact has one
    sequences: int | None
    prefixes: int | None
    what: str
    has_window: bool = False


class CrashGuard:
    """The guard of one opening."""

    def __init__(self, path: str | Path, artifact: str | Path) -> None:
        """Read the file of the previous start, and decide which setting to open."""
        self.path = Path(path)
        self._artifact, self._newest = Path(artifact), read_manifest(artifact)
        self._tokens, self._write_failure = 0, ""
        last = self._read()
        if last is None or last.artifact != self._newest.sha256:
            self.record = GuardRecord(artifact=self._newest.sha256)
        elif last.state in ("ended well", "open"):
            self.record = last.model_copy(update={"state": "opening", "step": self._step_of(last)})
        else:
            self.record = self._after_failure(last)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user: after starts that died, and about a file that cannot be written."""
        return tuple(note for note in (self.record.note, self._write_failure) if note)

    def narrowed(self, options: OpenOptions) -> tuple[Path, OpenOptions]:
        """Return the folder to open and `options`, reduced to the chosen setting."""
        if not self.record.step:
            return self._newest.folder, options
        setting = self._settings[self.record.step]
        reduced: dict[str, object] = {}
        if setting.tokens is not None:
            name = "window" if options.window or setting.has_window else "context"
            reduced[name] = min(getattr(options, name) or setting.tokens, setting.tokens)
        if setting.sequences:
            reduced["sequences"] = setting.sequences
        if setting.prefixes is not None:
            reduced["prefixes"] = setting.prefixes
        return setting.folder, options.model_copy(update=reduced)

    def begin(self) -> None:
        """Note that the opening begins."""
        self._write(self.record.model_copy(update={"state": "opening"}))

    def opened(self) -> None:
        """Note that the artifact is open; nothing runs yet."""
        self._write(self.record.model_copy(update={"state": "open"}))

    def before_step(self) -> None:
        """Note before the first step that the first tokens are about to be generated."""
        if self.record.state == "open":
            self._write(self.record.model_copy(update={"state": "first tokens"}))

    def after_step(self, tokens: int, has_answered: bool) -> None:
        """Count generated tokens; after `SAFE_TOKENS` of them, or a shorter answer, the start has ended well."""
        self._tokens += tokens
        if self.record.state == "first tokens" and (has_answered or self._tokens >= SAFE_TOKENS):
            self.end_well()

    def end_well(self) -> None:
        """Note that this start ended well. The next one keeps its setting."""
        self._write(self.record.model_copy(update={"state": "ended well", "failures": 0}))

    def close(self) -> None:
        """Note that the runtime was closed, so a request that was given up has ended well too."""
        if self.record.state == "first tokens":
            self.end_well()

    @cached_property
    def _settings(self) -> Sequence[GuardedSetting]:
        """The settings. Read only after a failure, because the former artifact's files are checked for it."""
        return settings_of(self._newest, former_artifact(self._artifact))

    def _step_of(self, last: GuardRecord) -> int:
        return min(last.step, len(self._settings) - 1) if last.step else 0

    def _after_failure(self, last: GuardRecord) -> GuardRecord:
        failures, step = last.failures + 1, self._step_of(last)
        if failures <= FAILURES_ALLOWED:
            return last.model_copy(update={"state": "opening", "failures": failures, "step": step})
        smaller = min(step + 1, len(self._settings) - 1)
        moment = "while it was opened" if last.state == "opening" else "at the first tokens"
        now = (
            f"opened smaller: {self._settings[smaller].what}" if smaller > step else "there is nothing smaller to open"
        )
        note = f"{failures} starts in a row died, the last {moment} ({self._settings[step].what}); {now}"
        log.warning("%s", note)
        return last.model_copy(update={"state": "opening", "failures": failures, "step": smaller, "note": note})

    def _read(self) -> GuardRecord | None:
        """Return the record of the previous start; None for a first start or a damaged file."""
        if not self.path.exists():
            return None
        try:
            return validate(read_bytes(self.path, _MAX_BYTES), GuardRecord, str(self.path))
        except InvalidInput as error:
            log.warning("the guard starts anew: %s", error)
            return None

    def _write(self, record: GuardRecord) -> None:
        self.record = record
        try:
            write_file(self.path, record.model_dump_json().encode())
        except (OSError, EdgekitError) as error:
            if not self._write_failure:
                reason = (isinstance(error, OSError) and error.strerror) or str(error)
                self._write_failure = (
                    f"{self.path}: the guard's file cannot be written ({reason}), so it guards nothing"
                )
                log.warning("%s", self._write_failure)


def settings_of(artifact: Artifact, former: Artifact | None) -> Sequence[GuardedSetting]:
    """Return the settings to try, largest first: as planned, smaller contexts, then the former artifact of a pull."""
    plan = artifact.plan
    settings = [GuardedSetting(artifact.folder, None, None, None, f"context {plan.context:,}")]
    tokens = plan.cache.window or plan.context
    for part in (tokens // 4, _FEWEST_TOKENS):
        if _FEWEST_TOKENS <= part < tokens:
            what = f"{part:,} tokens, one request at a time, no prefixes"
            settings.append(GuardedSetting(artifact.folder, part, 1, 0, what, plan.cache.window is not None))
            tokens = part
    if former is not None:
        settings.append(GuardedSetting(former.folder, None, 1, 0, f"the former artifact, {former.plan.model.name}"))
    return settings


def former_artifact(path: Path) -> Artifact | None:
    """Return the former artifact of an installation; None if there is none, or it cannot be opened."""
    try:
        installed = read_installed(path)
        if installed is None or installed.former is None:
            return None
        return open_artifact(folder_of(path, installed.former))
    except EdgekitError:
        return None
