"""Schemas are closed by default, pydantic classes are taken as schemas, and `answer.parsed` is their value."""

from __future__ import annotations

import copy
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, field_validator
from runtimes import make_runtime

from edgekit.errors import InvalidAnswer, InvalidOption
from edgekit.runtime.generation.schemas import close_objects, require_all
from edgekit.runtime.stream import Answer

pytest.importorskip("llguidance")

PERSON = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]}


class Cat(BaseModel):
    age: int

    @field_validator("age")
    @classmethod
    def _digit(cls, age: int) -> int:
        if age > 9:
            raise ValueError("a cat's age has one digit")
        return age


class Mat(BaseModel):
    cats: list[Cat]


def test_listed_objects_are_closed_at_every_depth() -> None:
    schema = {"properties": {"x": PERSON, "y": {"type": "array", "items": PERSON}}, "$defs": {"p": PERSON}}
    before = copy.deepcopy(schema)
    closed = close_objects(schema)
    assert schema == before
    for each in (closed, closed["properties"]["x"], closed["properties"]["y"]["items"], closed["$defs"]["p"]):
        assert each["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**PERSON, "additionalProperties": True},
        {**PERSON, "patternProperties": {"^x": {"type": "integer"}}},
        {"allOf": [PERSON, {"properties": {"b": {"type": "integer"}}}]},
        {"allOf": [{"$ref": "#/$defs/p"}, {"anyOf": [PERSON]}], "$defs": {"p": PERSON}},
        {**PERSON, "anyOf": [{"properties": {"b": {"type": "integer"}}}]},
        {"properties": {"b": {}}, "$ref": "#/$defs/q", "$defs": {"p": PERSON, "q": {"$ref": "#/$defs/p"}}},
        {"const": {"properties": {"a": 1}}},
    ],
    ids=str,
)
def test_open_and_combined_objects_are_unchanged(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


def test_alternatives_are_closed_each() -> None:
    closed = close_objects({"anyOf": [PERSON, {"type": "null"}]})
    assert closed["anyOf"] == [{**PERSON, "additionalProperties": False}, {"type": "null"}]


@pytest.mark.parametrize("seed", range(4))
def test_no_key_can_be_added_or_repeated(seed: int) -> None:
    with make_runtime() as runtime:
        answer = runtime.generate("the", schema=PERSON, temperature=1.5, seed=seed, max_tokens=200)
    assert answer.finish_reason == "stop"
    assert list(answer.parsed) == ["a"] and answer.text.count('"a"') == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_pydantic_class_is_a_schema(seed: int) -> None:
    class Small(BaseModel):
        good: bool

    with make_runtime() as runtime:
        answer = runtime.generate("the", schema=Small, temperature=1.5, seed=seed, max_tokens=200)
    assert isinstance(answer.parsed, Small)
    assert answer.parsed == Small.model_validate_json(answer.text)


class Leaf(BaseModel):
    good: bool = True
    next: Leaf | None = None
    names: list[str] = []


def test_an_answer_has_the_fields_with_defaults_too() -> None:
    class Tree(BaseModel):
        leaf: Leaf = Leaf()
        size: Literal["small", "large"] = "small"

    required = require_all(Tree.model_json_schema())
    assert required["required"] == ["leaf", "size"]
    assert required["$defs"]["Leaf"]["required"] == ["good", "next", "names"]
    with make_runtime() as runtime:
        answers = [
            runtime.generate("the", schema=Tree, temperature=1.0, seed=seed, max_tokens=400) for seed in range(8)
        ]
    whole = [answer for answer in answers if answer.finish_reason == "stop"]
    assert len(whole) >= 3, "some answers of a random model are longer than allowed"
    for answer in whole:
        found = json.loads(answer.text)
        assert list(found) == ["leaf", "size"] and list(found["leaf"]) == ["good", "next", "names"]
        assert isinstance(answer.parsed, Tree)


def test_an_answer_that_is_cut_short_is_refused_as_parsed() -> None:
    with make_runtime() as runtime:
        answer = runtime.generate("the", schema=Mat, max_tokens=1)
        with pytest.raises(InvalidAnswer, match=r"cut short; raise max_tokens"):
            _ = answer.parsed
        assert runtime.generate("the", max_tokens=1).parsed is None


def test_a_validator_of_the_class_may_refuse_the_answer() -> None:
    with make_runtime() as runtime:
        timings = runtime.generate("x", max_tokens=1).timings
    assert Answer('{"age": 9}', (), "stop", timings, 0, schema=Cat).parsed == Cat(age=9)
    with pytest.raises(InvalidAnswer, match=r"does not follow its schema: .age: ") as caught:
        _ = Answer('{"age": 10}', (), "stop", timings, 0, schema=Cat).parsed
    assert "\n" not in str(caught.value)


def test_invalid_schemas_are_refused_by_name() -> None:
    with make_runtime() as runtime, pytest.raises(InvalidOption, match=r"schema: must be a JSON schema .* pydantic"):
        runtime.generate("x", schema=int)  # type: ignore[arg-type]
