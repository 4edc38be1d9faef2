"""The command line. A command is a module of this folder or an entry point `edgekit.commands` of any package.

A command is imported when it is called. Errors are one line.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import pkgutil
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NoReturn

import click

from edgekit.common.files import fix_of
from edgekit.errors import DoesNotFit, EdgekitError, Unsupported, near_names, printable, quote_short
from edgekit.plugins import foreign_package_in, installed_commands, is_of_edgekit

_OUT_OF_MEMORY = "out of memory; close other programs, or choose a smaller model or context"
NO_THREAD = "can't start new thread"  # a RuntimeError of Python
_NOT_OUR_FAULT = {errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}
# Each command with its one line of help: importing all of them takes a second.
GROUPS = {
    "Use a model": {
        "run": "Answer PROMPT with MODEL: an artifact, a model's folder, a .gguf file, a hub id, or `demo`.",
        "chat": "Talk with MODEL: an artifact, a model's folder, a .gguf file, a hub id, or `demo`.",
        "embed": "Print one vector for each text in FILE, as jsonl.",
        "rerank": "Order the documents of each line of FILE, a jsonl, for its query.",
        "serve": "Serve MODELS over HTTP: artifacts, models' folders, .gguf files, hub ids, or `demo`.",
    },
    "Build for devices": {
        "choose": "List known models that fit a device: licence, memory and speed as `plan` predicts them.",
        "plan": "Decide how to build MODEL for each device, and say why.",
        "export": "Build the artifact of MODEL for each device, check it, and seal it.",
        "quantize": "Quantise MODEL once, into integers and scales that every target packs without rounding again.",
    },
    "Build for servers": {
        "handover": "Plan how a server holds MODEL on data-centre GPUs, and write its weights and files."
    },
    "Deliver": {
        "sign": "Sign ARTIFACT, after checking every byte of it; the signature is its file model.sig.",
        "bom": "Print what ARTIFACT is made of: model, licence, base, quantisation, calibration, quality, "
        "engines and files.",
        "publish": "Add ARTIFACTS to a release of a site, best first; `edgekit pull` fetches the first that a "
        "device can run.",
        "pull": "Fetch the newest release at URL for this device; only chunks that are not on the disk are fetched.",
        "rollback": "Return FOLDER, which `edgekit pull` filled, to its former artifact, after checking every "
        "byte of it.",
    },
    "Look": {
        "devices": "List the known devices, or show one.",
        "doctor": "Check the installed libraries and this machine, and print the command that fixes each fault.",
        "inspect": "Show the contents of PATH: neutral weights from `quantize`, an artifact from `export`, or "
        "a GGUF file.",
        "verify": "Check every byte of ARTIFACT against its manifest, and the manifest against its seal.",
        "store": "List and remove the files of edgekit's cache. All of them can be made again.",
    },
    "Measure": {
        "bench": "Measure ARTIFACTS on this machine.",
        "compare": "Compare the reports BEFORE and AFTER, as `edgekit bench -o` or `--json` wrote them.",
        "eval": "Compare ARTIFACT with its float model on the same tokens: perplexity, KL divergence, "
        "equal top tokens.",
        "score": "Print the log-probability that ARTIFACT gives each continuation in FILE, a jsonl.",
        "parity": "Compare ARTIFACTS of one model with the first of them.",
        "lab": "Measure artifacts on many devices, and compare with a baseline. Every result is kept.",
    },
}
# Command names of other tools, and our equivalents.
_ELSEWHERE = {
    "list": "edgekit store ls, or edgekit devices",
    "ls": "edgekit store ls",
    "ps": "edgekit store ls",
    "models": "edgekit choose, or edgekit store ls",
    "rm": "edgekit store prune",
    "show": "edgekit inspect, or edgekit devices show",
    "generate": "edgekit run",
    "convert": "edgekit export",
    "version": "edgekit --version",
    "help": "edgekit --help",
}


class Commands(click.Group):
    """The group of all commands: the core's, in this folder, and commands that packages add."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_core_commands(), *installed_commands()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _core_commands():
            command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
            return command
        if cmd_name not in (added := installed_commands()):
            return None
        return _load(added[cmd_name])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            near = near_names(args[0], known, most=1)
            hint = _ELSEWHERE.get(args[0]) or (f"edgekit {near[0]}" if near else "")
            text = f"did you mean {hint}?" if hint else "`edgekit --help` lists them."
            raise click.UsageError(f"No such command {quote_short(args[0])}; {text}", ctx)
        if not sys.stderr.isatty():
            return super().resolve_command(ctx, args)
        click.echo("edgekit: loading …\r", err=True, nl=False)  # imports may take a second
        try:
            return super().resolve_command(ctx, args)
        finally:
            click.echo("\x1b[2K", err=True, nl=False)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in workflow order."""
        for title, described in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(described.items()))
        if foreign := [entry for entry in installed_commands().values() if not is_of_edgekit(entry)]:
            with formatter.section("Of other packages"):
                formatter.write_dl([(entry.name, _help_of(entry)) for entry in foreign])


def _core_commands() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")}


def _load(entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
    except EdgekitError:
        raise
    except Exception as error:
        if is_of_edgekit(entry):
            raise
        raise Unsupported(
            f"command {entry.name} ({entry.value}) cannot be loaded: {error}; reinstall its package"
        ) from error
    if not isinstance(command, click.Command):
        raise Unsupported(f"command {entry.name} ({entry.value}) is no click command; its package must name one")
    return command


def _help_of(entry: EntryPoint) -> str:
    try:
        return _load(entry).get_short_help_str(200)
    except EdgekitError as error:
        return str(error)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(None, "-V", "--version", package_name="edgekit", message="%(package)s %(version)s")
@click.pass_context
def command(context: click.Context) -> None:
    """One model spec in; the right quantised artifact for every device out; one runtime to run them all."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Run a command. `EdgekitError`, `OSError`, lack of memory and defects of other packages' targets end in one line.

    Any other exception is a bug of edgekit, which a traceback shows.
    """
    _accept_any_name()
    from edgekit.common.log import show_slow

    show_slow(lambda line: click.echo(f"edgekit: {line}", err=True))
    try:
        outcome = command.main(args=arguments, prog_name="edgekit", standalone_mode=False)
        sys.exit(outcome if isinstance(outcome, int) else 0)
    except click.exceptions.Abort:
        _end("stopped", 130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except DoesNotFit as error:
        from edgekit.cli._rejected import show_what_does_not_fit

        show_what_does_not_fit(error)
        _end(str(error), error.exit_code)
    except EdgekitError as error:
        _end(str(error), error.exit_code)
    except UnicodeEncodeError as error:
        if error.reason != "surrogates not allowed":
            raise
        _end("an argument is not valid UTF-8; type it again")
    except MemoryError:
        _end(_OUT_OF_MEMORY)
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            _end_or_raise(error)
        _end(f"{error}; this user's limit is reached (`ulimit -u`)")
    except OSError as error:
        if error.errno == errno.ENOMEM:
            _end(_OUT_OF_MEMORY)
        if error.filename is not None:
            name = os.fsdecode(error.filename)
            _end(f"{quote_short(name, 200)}: {error.strerror}; {fix_of(error, Path(name))}")
        if error.errno not in _NOT_OUR_FAULT:
            _end_or_raise(error)
        _end(f"{error.strerror}; check the disk and the limits of this user (`ulimit -a`)")
    except Exception as error:
        _end_or_raise(error)


def _end_or_raise(error: Exception) -> NoReturn:
    """End in one line if `error` came through a target or command of another package; otherwise raise it again."""
    from edgekit.common.log import log

    if not (name := foreign_package_in(error)):
        raise error
    log.debug("%s raised", name, exc_info=error)
    what = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    _end(f"{name}: {what[:300]}; this is a defect of that {name.split()[0]}'s package; EDGEKIT_LOG=debug shows where")


def _end(line: str, code: int = EdgekitError.exit_code) -> NoReturn:
    print(f"edgekit: {printable(line)}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


def _accept_any_name() -> None:
    """Escape characters that the encoding of stdout lacks, instead of failing. End where one of both is closed."""
    if sys.stdout is None or sys.stderr is None:
        _end("standard output or error is closed; send it to a file or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
