"""Every pair of commands that write a site, an installation, an output or the cache, at the same moment.

`make fuzz` runs each pair twenty times.
"""

from __future__ import annotations

import pytest
from pairs_of_commands import Pairs, pairs

pytestmark = [pytest.mark.slow, pytest.mark.onnx, pytest.mark.quantize]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> object:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        yield Pairs(tmp_path_factory.mktemp("pairs") / "shared", patch)


@pytest.mark.parametrize(("first", "second"), pairs())
def test_two_commands_at_once_lose_nothing(made: Pairs, first: str, second: str) -> None:
    for _ in range(2):
        made.run(first, second)
