"""The parts of ExecuTorch's wheel that C++ is linked with."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def installed_folder() -> Path:
    """The folder of the installed package, which has CMake's files."""
    wheel = (find_spec("executorch") or pytest.fail("no executorch")).submodule_search_locations
    assert wheel
    return Path(next(iter(wheel)))


def attention_library() -> Path:
    """ExecuTorch's attention operators, which the wheel has only for Python."""
    library = installed_folder() / "extension/llm/custom_ops/libcustom_ops_aot_lib.so"
    if not library.exists():
        pytest.skip("this ExecuTorch has no library of operators")
    return library
