"""The helpers that an app or another package needs to write a command; entry points `edgekit.commands` name it.

A command is a click command. `options` turns the fields of frozen models into its options, so that each option has one
name, type, default and text.
"""

from edgekit.common.lazy import lazy

__getattr__, __all__ = lazy(__name__, __file__)
