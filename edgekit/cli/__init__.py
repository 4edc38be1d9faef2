"""The command line: finds commands by file name, imports only the one that is called, turns errors into one line."""

from __future__ import annotations

import errno
import importlib
import io
import os
import pkgutil
import sys
from typing import NoReturn

import click

from edgekit.errors import DoesNotFit, EdgekitError, clip

_NOT_OUR_FAULT = {errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Commands(click.Group):
    """A group whose commands are the modules beside this file; a module is imported when its command is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="edgekit", message="%(package)s %(version)s")
def command() -> None:
    """One model spec in; the right quantised artifact for every device out; one runtime to run them all."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command. An error of ours, or a path that the system refuses, is one line; the rest are bugs."""
    _accept_any_name()
    try:
        outcome = command.main(args=arguments, prog_name="edgekit", standalone_mode=False)
        sys.exit(outcome if isinstance(outcome, int) else 0)
    except click.exceptions.Abort:
        _end("stopped", 130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except DoesNotFit as error:
        if error.table:
            print(error.table)  # noqa: T201
        _end(str(error), error.exit_code)
    except EdgekitError as error:
        _end(" ".join(str(error).split()), error.exit_code)
    except UnicodeEncodeError as error:
        if error.reason != "surrogates not allowed":
            raise
        _end("an argument holds bytes that are no text in UTF-8; write it again")
    except OSError as error:
        if error.filename is not None:
            name = clip(os.fsdecode(error.filename), 200)
            _end(f"{name}: {error.strerror}; check the path, and what you may do there")
        if error.errno not in _NOT_OUR_FAULT:
            raise
        _end(f"{error.strerror}; look at the disk and its limits")


def _end(line: str, code: int = EdgekitError.exit_code) -> NoReturn:
    print(f"edgekit: {line}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


def _accept_any_name() -> None:
    """File names may hold bytes that no text has, and terminals may lack a character: neither ends a command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
