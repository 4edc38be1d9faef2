"""edgekit: one model spec in, the right quantised artifact for every device out, one runtime to run them all.

`__all__` is the public interface, which `__init__.pyi` lists; each name is imported on first use.
"""

from edgekit.common.lazy import lazy

__version__ = "0.1.0"
__getattr__, _names = lazy(__name__, __file__)
__all__ = sorted([*_names, "__version__"])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
