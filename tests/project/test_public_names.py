"""Public names are pinned: a name is added or removed on purpose."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

import edgekit
from edgekit import api
from edgekit.planner.request import PlanOptions, PlanRequest


def test_the_public_names_of_edgekit() -> None:
    assert edgekit.__all__ == (Path(__file__).parents[1] / "data/public_names.txt").read_text().split()


def test_every_public_name_is_there_and_has_a_docstring() -> None:
    for name in edgekit.__all__:
        value = getattr(edgekit, name)
        assert value is not None
        assert name == "__version__" or inspect.getdoc(value), name
    assert set(edgekit.__all__) <= set(dir(edgekit))


def test_every_public_name_is_in_the_reference() -> None:
    page = (Path(__file__).parents[2] / "docs/reference.md").read_text()
    for name in set(edgekit.__all__) - {"__version__", "EdgekitError"}:
        value = getattr(edgekit, name)
        assert f"::: {value.__module__}.{value.__qualname__}\n" in page, name


def test_functions_have_an_example_in_their_docstring() -> None:
    runtime = edgekit.Runtime
    methods = (
        runtime.generate,
        runtime.chat,
        runtime.stream,
        runtime.submit,
        runtime.score,
        runtime.embed,
        runtime.pin,
    )
    for function in (edgekit.plan, edgekit.export, edgekit.quantize, edgekit.AsyncRuntime.open, *methods):
        assert ">>> " in (function.__doc__ or "")


def test_the_keywords_of_a_plan_are_the_fields_of_its_request() -> None:
    assert list(PlanOptions.__annotations__) == list(PlanRequest.model_fields)
    hints = typing.get_type_hints(PlanOptions)
    for name, field in PlanRequest.model_fields.items():
        assert (type(None) in typing.get_args(hints[name])) == (field.default is None), name


def test_the_other_keywords_are_documented() -> None:
    for function in (api.plan, api.export, api.quantize):
        for name in inspect.signature(function).parameters:
            assert name in (function.__doc__ or ""), f"{function.__name__} does not document {name}"


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert edgekit.__version__ == version("edgekit")
