"""edgekit: one model spec in, the right quantised artifact for every device out, one runtime to run them all."""

from __future__ import annotations

from edgekit.errors import EdgekitError

__version__ = "0.1.0"
__all__ = ["EdgekitError", "__version__"]
