"""What is public is pinned: a name comes or goes on purpose."""

from __future__ import annotations

import edgekit


def test_the_public_names_of_edgekit() -> None:
    assert edgekit.__all__ == [
        "Answer",
        "AsyncRuntime",
        "EdgekitError",
        "Piece",
        "Runtime",
        "Stream",
        "__version__",
        "open",
    ]


def test_every_public_name_is_there_and_no_other_is_promised() -> None:
    for name in edgekit.__all__:
        assert getattr(edgekit, name) is not None
    assert set(edgekit.__all__) <= set(dir(edgekit))


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert edgekit.__version__ == version("edgekit")
