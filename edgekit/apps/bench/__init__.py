"""Measure artifacts: speed, memory and quality, with reports.

Other apps may use the names in `__init__.pyi`; each is imported on first use.
"""

from edgekit.common.lazy import lazy

__getattr__, __all__ = lazy(__name__, __file__)
