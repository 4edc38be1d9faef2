"""Registers `optimum-cli export edgekit`, with the options of `edgekit export`.

optimum imports every file of this namespace package; there must be no `__init__.py` in its folder or above.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator

import click
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

from edgekit.cli import main
from edgekit.cli.export import command


def _options() -> Iterator[click.Option]:
    return (option for option in command.params if isinstance(option, click.Option))


class EdgekitExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]  # optimum has no types
    """`optimum-cli export edgekit --model MODEL --device NAME --output DIR`."""

    COMMAND = CommandInfo(name="edgekit", help="Export to a sealed edgekit artifact: ONNX Runtime, MLX, ExecuTorch.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        parser.add_argument("--model", "-m", required=True, help="A Hugging Face folder, a hub id, or `demo`.")
        for option in _options():
            # Without defaults, so that only options that were typed are passed on.
            kind = "store_true" if option.is_flag else "append" if option.multiple else "store"
            text = (option.help or "").replace("%", "%%")
            parser.add_argument(*option.opts, dest=option.name, action=kind, default=None, help=text)

    def run(self) -> None:
        arguments = ["export", self.args.model]
        for option in _options():
            value = getattr(self.args, option.name or "")
            name = max(option.opts, key=len)
            if value is True:
                arguments.append(name)
            elif value is not None:
                for each in value if isinstance(value, list) else [value]:
                    arguments += [name, str(each)]
        main(arguments)


REGISTER_COMMANDS = [(EdgekitExportCommand, ExportCommand)]
