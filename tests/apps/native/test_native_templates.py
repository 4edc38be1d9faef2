"""Chat templates render as Python renders them, byte for byte, or are refused by name; hostile ones are stopped."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from chat_templates import ATTACKS, BOMBS, CALL, CHATS, FAMILIES, OPTIONS, SPECIAL, WEATHER
from template_snippets import EXPRESSIONS, MESSAGES, TEMPLATES

from edgekit.apps.native.library import NativeLibrary, NativeTemplate
from edgekit.errors import EdgekitError, InvalidInput
from edgekit.runtime.generation.chat_template import ChatTemplate, read_template

pytestmark = pytest.mark.slow  # the library is compiled
DEMO = Path(__file__).parents[3] / "examples/training/demo/target"
STORED = {**FAMILIES, "demo": (DEMO / "chat_template.jinja").read_text()}
NOT_HERE = "which this library does not have"
TEXTS = (
    "",
    " ",
    "Hi",
    "  two\nlines\r\n",
    "日本 🙂 é\u2028",
    "<think>hm</think>\n\nso",
    "<tool_response>",
    '"\\/<&>\x7f',
)


@pytest.fixture(scope="module")
def python() -> Iterator[ChatTemplate]:
    template = ChatTemplate({}, SPECIAL)
    yield template
    template.close()


def opened(library: NativeLibrary, source: str) -> NativeTemplate:
    return library.read_template(json.dumps(SPECIAL).encode(), source.encode())


def outcome(render: Callable[[], str]) -> tuple[str | None, str]:
    """The text; None and the error where it was refused."""
    try:
        return render(), ""
    except EdgekitError as error:
        return None, str(error)


def compared(library: NativeLibrary, python: ChatTemplate, source: str, chat: Any, **options: Any) -> str:
    """Render in both: "equal", "refused" by both, or "not here", which is said by name."""
    python._sources["default"] = source
    native = opened(library, source)
    expected, _ = outcome(partial(python.render, chat, **options))
    found, reason = outcome(partial(native.render, chat, **options))
    native.close()
    assert "\n" not in reason
    if found is None and NOT_HERE in reason:
        return "not here"
    assert found == expected, (source[:300], chat, options, reason)
    return "refused" if expected is None else "equal"


def chat(draw: random.Random) -> list[dict[str, Any]]:
    """A conversation of up to eight messages."""
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.4:
        messages.append({"role": "system", "content": draw.choice(TEXTS)})
    for place in range(draw.randrange(1, 8)):
        message: dict[str, Any] = {"role": ("user", "assistant")[place % 2], "content": draw.choice(TEXTS)}
        if draw.random() < 0.1:
            message["role"] = draw.choice(("tool", "system", "user", "assistant"))
        if draw.random() < 0.1:
            message["content"] = [{"type": "text", "text": draw.choice(TEXTS)}, {"type": "image"}]
        if message["role"] == "assistant" and draw.random() < 0.3:
            message |= draw.choice(({"tool_calls": [CALL]}, {"reasoning": draw.choice(TEXTS)}, {"content": None}))
        messages.append(message)
    return messages


@pytest.mark.parametrize("family", STORED)
def test_templates_render_as_in_python(family: str, library: NativeLibrary, python: ChatTemplate) -> None:
    draw, seen = random.Random(family), Counter[str]()
    chats = [*CHATS.values(), *(chat(draw) for _ in range(40))]
    for each, tools, add in product(chats, (None, [WEATHER]), (True, False)):
        options = draw.choice(OPTIONS)
        seen[
            compared(
                library, python, STORED[family], each,
                tools=tools, add_generation_prompt=add, template_options=options,
            )
        ] += 1  # fmt: skip
    if family == "odd":  # written with everything that templates seldom use
        assert seen == {"not here": 188}
    else:
        # Not here: a list of emoji that a template writes as Python's `str` does.
        assert seen["not here"] < 20 and seen["equal"] > 90, seen


def test_expressions_and_statements_have_the_results_of_python(library: NativeLibrary, python: ChatTemplate) -> None:
    sources = [*(f"{{{{ {each} }}}}" for each in EXPRESSIONS), *TEMPLATES]
    seen = Counter(compared(library, python, source, MESSAGES) for source in sources)
    assert seen["equal"] > 440 and seen["not here"] < 80, seen  # of 617


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ 'a' | wordwrap(3) }}", "the filter 'wordwrap'"),
        ("{{ 'a'.zfill(3) }}", "the method 'zfill' of a text"),
        ("{{ 1 is escaped }}", "the test 'escaped'"),
        ("{% include 'x' %}", "the tag 'include'"),
        ("{% for a in b recursive %}{% endfor %}", "a recursive loop"),
        ("{{ cycler(1) }}", "the function 'cycler'"),
        ("{{ ''.__class__ }}", "the attribute '__class__'"),
        ("{{ '%d' % 1 }}", "'%' of a text"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(library: NativeLibrary, source: str, name: str) -> None:
    template = opened(library, source)
    with pytest.raises(InvalidInput, match=f"{name}.*{NOT_HERE}"):
        template.render([{"role": "user", "content": ""}])
    template.close()


@pytest.mark.parametrize("hostile", [*ATTACKS.values(), *BOMBS.values()], ids=[*ATTACKS, *BOMBS])
def test_hostile_templates_are_stopped(library: NativeLibrary, hostile: str, tmp_path: Path) -> None:
    template = opened(library, hostile.replace("CANARY", str(tmp_path / "canary")))
    text, reason = outcome(partial(template.render, [{"role": "user", "content": "x"}]))
    template.close()
    assert text is None or hostile == ATTACKS["dict type"], (text, reason)
    assert not list(tmp_path.iterdir())


def test_a_long_chat_is_rendered(library: NativeLibrary, python: ChatTemplate) -> None:
    """The limits of a rendering grow with the chat."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": "word " * 20} for place in range(3001)]
    assert compared(library, python, STORED["qwen"], turns) == "equal"
    assert compared(library, python, STORED["gemma"], [{"role": "user", "content": "word " * 200_000}]) == "equal"


SLOW = {
    "a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a search": "{% set s = 'a' * 900000 %}{% for a in range(9999) %}{{ s.find('a' * 400000 ~ 'b') }}{% endfor %}",
    "in": "{% set s = 'a' * 900000 %}{% for a in range(9999) %}{{ ('a' * 400000 ~ 'b') in s }}{% endfor %}",
    "long keys": "{% set k = 'a' * 900000 %}{% set d = dict() %}{% for a in range(99999) %}{{ d[k] }}{% endfor %}",
    "a generator": "{% set g = range(99999) | map('string') %}{% for a in range(99999) %}{{ g | first }}{% endfor %}",
    "a sort": "{% set k = 'a' * 900000 %}{% for a in range(99999) %}{{ [k] | sort | length }}{% endfor %}",
    "lists within lists": "{% set n = namespace(a=[]) %}{% for a in range(99999) %}{% set n.a = [n.a] %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("source", SLOW.values(), ids=SLOW)
def test_a_template_that_works_for_long_is_stopped_soon(library: NativeLibrary, source: str) -> None:
    template = opened(library, source)
    began = time.process_time()
    with pytest.raises(InvalidInput, match=r"it works for too long|too deep"):
        template.render([{"role": "user", "content": "x"}])
    assert time.process_time() - began < 20
    template.close()


BAD_CHATS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "none": ([], {}, "at least one"),
    "no list": ({"role": "user"}, {}, "at least one"),
    "no role": ([{"content": "a"}], {}, r"messages\[0\] must be an object with a role"),
    "no content": ([{"role": "user"}], {}, r"messages\[0\]: a message of role user needs content"),
    "too many": ([{"role": "user", "content": ""}] * 10_001, {}, "10001 messages"),
    "too large": ([{"role": "user", "content": "x" * (9 << 20)}], {}, "at most 8388608 are rendered"),
    "tools": ([{"role": "user", "content": ""}], {"tools": ["a"]}, "tools must be"),
    "a reserved name": ([{"role": "user", "content": ""}], {"template_options": {"messages": 1}}, "'messages' cannot"),
    "no name": ([{"role": "user", "content": ""}], {"template_options": {"a b": 1}}, "'a b' cannot"),
    "a huge number": ([{"role": "user", "content": 1 << 64}], {}, "a number out of range"),
}


@pytest.mark.parametrize("case", BAD_CHATS.values(), ids=BAD_CHATS)
def test_bad_chats_are_refused(library: NativeLibrary, case: tuple[Any, dict[str, Any], str]) -> None:
    messages, options, reason = case
    template = opened(library, "x{{ tools }}")
    with pytest.raises(InvalidInput, match=reason):
        template.render(messages, **options)
    template.close()


def test_templates_are_found_where_models_keep_them(library: NativeLibrary, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T {{ tools }}"}]
    config = {"chat_template": named, "bos_token": {"content": "<b>"}, "eos_token": "<e>", "model_max_length": 10**30}
    chat = [{"role": "user", "content": ""}]
    for source in (None, "{{ bos_token }}{{ eos_token }}", "{% broken"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if source is not None:
            (tmp_path / "chat_template.jinja").write_text(source)
        python = read_template(tmp_path)
        native = library.read_template(json.dumps(config).encode(), source and source.encode())
        for tools in (None, [{}]):
            assert (
                outcome(partial(native.render, chat, tools=tools))[0]
                == outcome(partial(python.render, chat, tools=tools))[0]
            )
        python.close()
        native.close()
    template = library.read_template(None, None)
    with pytest.raises(InvalidInput, match="no chat template"):
        template.render(chat)
    template.close()
