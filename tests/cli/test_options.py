"""Options made from the fields of models: spelling, types, bounds, and one validated object for the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import Field

from edgekit.cli._options import as_typed, options
from edgekit.common.base import Frozen
from edgekit.common.options import ByteCount, Option, read_options
from edgekit.errors import InvalidInput, UnknownName


class Cake(Frozen):
    """A model with a field of each kind."""

    layers: Annotated[int, Field(ge=1, le=9)] = Field(default=2, description="Layers of the cake.")
    sugar: Annotated[ByteCount, Field(ge=1)] | None = Field(default=None, description="Most sugar.")
    kind: Literal["plain", "nut"] = Field(default="plain", description="The dough.")
    tops: Annotated[tuple[str, ...], Option(name="top", short="t")] = Field(default=(), description="A topping.")
    plate: Path | None = Field(default=None, description="The plate.")
    warm: bool = Field(default=False, description="Serve it warm.")
    iced: Annotated[bool | None, Option(negative="bare")] = Field(default=None, description="With icing.")
    hidden: int = 3  # no description, and so no option


def bake(*arguments: str) -> tuple[Cake, list[str]]:
    given: list[Any] = []

    @click.command()
    @options(cake=Cake)
    def command(cake: Cake) -> None:
        given.extend([cake, as_typed("cake")])

    CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    return given[0], given[1]


def test_omitted_options_have_defaults_and_are_unset() -> None:
    cake, typed = bake()
    assert cake == Cake() and cake.model_fields_set == set() and typed == []


def test_every_field_type_becomes_an_option() -> None:
    words = "--layers 3 --sugar 1KiB --kind nut -t nuts -t cream --plate a/b --warm --bare"
    cake, typed = bake(*words.split())
    given = {"layers": 3, "sugar": 1024, "kind": "nut", "tops": ("nuts", "cream"), "plate": Path("a/b")}
    assert cake == Cake(**given, warm=True, iced=False)
    assert " ".join(typed) == "--layers 3 --sugar 1KiB --kind nut --top nuts --top cream --plate a/b --warm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "0"), "--layers 0: must be at least 1"),
        (("--layers", "10"), "--layers 10: must be at most 9"),
        (("--sugar", "much"), "--sugar: 'much' is not a size; write it as 1.5GiB, 800MB or a number of bytes"),
        (("--sugar", "0"), "--sugar '0': must be at least 1"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_the_options_name(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{message}"):
        bake(*arguments)


def test_an_unknown_keyword_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=r"unknown option 'suger'; did you mean sugar\?"):
        read_options(Cake, {"suger": 1})


def test_the_help_has_types_choices_and_defaults() -> None:
    @click.command()
    @options(cake=Cake)
    def command(cake: Cake) -> None: ...

    shown = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    for part in (
        "--layers INTEGER Layers of the cake. [default: 2]",
        "--sugar SIZE",
        "[plain|nut]",
        "-t, --top TEXT A topping. May be repeated.",
        "--iced / --bare",
    ):
        assert part in shown
    assert "hidden" not in shown


def test_unknown_names_have_a_nearest_guess() -> None:
    assert "did you mean iphone-16-pro?" in str(UnknownName("device", "iPhone16pro", ["iphone-16-pro", "pixel-9"]))
    assert "did you mean" not in str(UnknownName("device", "toaster", ["iphone-16-pro", "pixel-9"]))
