"""Chat templates render as in transformers, byte for byte, and hostile templates are stopped."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from chat_templates import ATTACKS, BOMBS, CHATS, FAMILIES, OPTIONS, SPECIAL, WEATHER
from runtimes import make_runtime, refusal

from edgekit.common.footprint import footprint_of
from edgekit.common.subprocesses import WORKER_BYTES
from edgekit.errors import InvalidInput, LimitExceeded, Unsupported
from edgekit.runtime.generation.chat_template import ChatTemplate, read_template
from edgekit.runtime.generation.template_worker import RENDER_BYTES
from edgekit.runtime.generation.tool_calls import parse_tool_calls
from edgekit.runtime.memory.budget import MemoryBudget


@pytest.fixture(scope="module")
def transformers_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    from runtimes import byte_level

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(byte_level().to_str())
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **SPECIAL)


def outcome(render: Any) -> str | None:
    """The rendered text; None where the template refused."""
    try:
        return str(render())
    except Exception:
        return None


@pytest.mark.quantize
@pytest.mark.parametrize("family", FAMILIES)
def test_templates_render_as_in_transformers(family: str, transformers_tokenizer: Any) -> None:
    source, rendered = FAMILIES[family], 0
    template = ChatTemplate({"default": source}, SPECIAL)
    options: dict[str, Any]
    for name, tools, add, options in product(CHATS, (None, [WEATHER]), (True, False), OPTIONS):
        if tools and "tools" not in source:
            continue
        ask = partial(transformers_tokenizer.apply_chat_template, CHATS[name], chat_template=source, tokenize=False)
        expected = outcome(partial(ask, tools=tools, add_generation_prompt=add, **options))
        ours = partial(template.render, CHATS[name], tools=tools, add_generation_prompt=add, template_options=options)
        assert outcome(ours) == expected, f"{name}, tools {bool(tools)}, generation prompt {add}, {options}"
        rendered += expected is not None
    template.close()
    assert rendered >= 12, "nearly everything was refused, so nothing was compared"


@pytest.mark.quantize
def test_the_demo_model_renders_as_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    folder = Path(__file__).parents[2] / "examples/training/demo/target"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    template = read_template(folder)
    chat = CHATS["system and turns"]
    assert template.render(chat) == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    template.close()


HELD = ("<class", "<module", "os.system", "root:", "site-packages", "_io.", "<frame", "<code")


@pytest.fixture(scope="module")
def short() -> Iterator[ChatTemplate]:
    template = ChatTemplate({}, SPECIAL, limit_s=1.0)
    yield template
    template.close()


def render(template: ChatTemplate, source: str) -> str:
    template._sources["default"] = source
    return template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_sandbox_escapes_are_refused_or_empty(attack: str, short: ChatTemplate, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    written: list[str] = []
    error = refusal(lambda: written.append(render(short, attack.replace("CANARY", str(canary)))))
    assert error is not None or not any(held in written[0] for held in HELD), written
    assert not canary.exists()
    assert render(short, "{{ messages[0].role }}") == "user"


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_expensive_templates_are_stopped_and_the_next_chat_works(bomb: str, short: ChatTemplate) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidInput) as caught:
        render(short, bomb)
    assert time.monotonic() - began < 20
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert render(short, "{{ messages[0].role }}") == "user"


def test_expensive_templates_do_not_grow_our_memory(short: ChatTemplate) -> None:
    from edgekit.common.footprint import footprint

    render(short, "warm")
    before = footprint().rss_bytes
    with pytest.raises(LimitExceeded):
        render(short, BOMBS["a gigabyte in pieces"])
    assert before is None or footprint().rss_bytes - before < 32 << 20


def test_the_worker_stays_warm_and_is_replaced_when_it_dies() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    try:
        assert template.render([{"role": "user", "content": "a"}]) == "a"
        first = template._worker.process_id
        assert template.render([{"role": "user", "content": "b"}]) == "b"
        assert template._worker.process_id == first
        os.kill(first, 9)
        time.sleep(0.2)
        assert template.render([{"role": "user", "content": "c"}]) == "c"
        assert template._worker.process_id != first
    finally:
        template.close()
        template.close()
    assert template._worker.process_id is None


def test_a_bundled_program_is_not_started_again_as_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(Unsupported, match="bundled"):
        ChatTemplate({"default": "x"}, {}).render([{"role": "user", "content": ""}])


BAD_MESSAGES = {
    "none": [],
    "a string": "hi",
    "no list": {"role": "user"},
    "a string inside": ["hi"],
    "no role": [{"content": "hi"}],
    "no content": [{"role": "user"}],
    "a number as role": [{"role": 5, "content": "hi"}],
    "an object": [{"role": "user", "content": object()}],
    "nan": [{"role": "user", "content": float("nan")}],
    "bytes": [{"role": "user", "content": b"hi"}],
    "too many": [{"role": "user", "content": ""}] * 10_001,
    "too large": [{"role": "user", "content": "x" * (33 << 20)}],
}


@pytest.mark.parametrize("messages", BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_bad_messages_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidInput):
        ChatTemplate({"default": "x"}, {}).render(messages)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "a b", "", 5])
def test_template_options_cannot_override_reserved_names(name: Any) -> None:
    with pytest.raises(InvalidInput, match="template_options"):
        ChatTemplate({"default": "x"}, {}).render([{"role": "user", "content": ""}], template_options={name: 1})


def test_tools_are_described_in_text_where_the_template_takes_none() -> None:
    plain = ChatTemplate({"default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"}, {})
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ōtsu"}}}
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "snow"},
        {"role": "assistant", "content": "both", "reasoning": "hm"},
    ]
    try:
        text = plain.render(chat, tools=[WEATHER])
        system, _, rest = text.partition("<user>")
        assert system.startswith("<system>be brief\n\n# Tools")
        assert json.dumps(WEATHER, ensure_ascii=False) in system
        written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ōtsu"}}\n</tool_call>'
        results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsnow\n</tool_response>"
        assert rest == f"and now?<assistant>{written}\n{written}<user>{results}<assistant>both"
        assert parse_tool_calls(written, {"weather"}).calls[0].arguments == {"city": "Ōtsu"}
        assert plain.render(chat[1:2], tools=[WEATHER]).startswith("<system># Tools")
        with pytest.raises(InvalidInput):
            plain.render([{"role": "assistant", "tool_calls": 5}], tools=[WEATHER])
    finally:
        plain.close()


def test_model_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no chat template"):
        read_template(tmp_path).render([{"role": "user", "content": ""}])


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    config = (
        '{"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T {{ tools }}"}],'
    )
    (tmp_path / "tokenizer_config.json").write_text(config + '"bos_token": {"content": "<b>"}, "eos_token": "<e>"}')
    template = read_template(tmp_path)
    chat = [{"role": "user", "content": ""}]
    try:
        assert template.render(chat) == "D" and template.render(chat, tools=[{}]).startswith("T")
    finally:
        template.close()
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    template = read_template(tmp_path)
    try:
        assert template.exists and template.render(chat) == "<b><e>"
    finally:
        template.close()


def test_every_filter_works_where_no_file_can_be_opened() -> None:
    source = "{{ 'one two' | wordwrap(4) }}|{{ lipsum(n=1) | length > 20 }}|{{ [1] | pprint }}|{{ [7] | random }}"
    template = ChatTemplate({"default": source}, {})
    try:
        assert template.render([{"role": "user", "content": "a"}]) == "one\ntwo|True|[1]|7"
    finally:
        template.close()


def test_a_large_chat_is_counted_while_it_is_rendered_and_leaves_nothing() -> None:
    budget = MemoryBudget(256 << 20)
    with make_runtime(budget=budget, context=16_384) as runtime:
        runtime.render([{"role": "user", "content": "Hi"}])
        usual, taken = WORKER_BYTES + RENDER_BYTES, list[int]()
        assert budget.taken["workers"] == usual
        ask = runtime.template._worker.ask

        def asked(request: Any, limit: int) -> Any:
            taken.append(budget.taken["workers"])
            return ask(request, limit)

        runtime.template._worker.ask = asked  # type: ignore[method-assign]
        text = "word " * 150_000
        assert text.strip() in runtime.render([{"role": "user", "content": text}])
        assert taken[0] > usual + 5 * len(text) and budget.taken["workers"] == usual
        runtime.render([{"role": "user", "content": "Hi"}])
        process = runtime.template.process_id
        assert process is not None and (footprint_of(process) or 0) <= usual


def test_a_template_gets_memory_by_the_size_of_its_chat() -> None:
    template = ChatTemplate({"default": "{% set x = 'x' * 20000000 %}{{ messages[0]['content'] }}{{ x | length }}"}, {})
    try:
        with pytest.raises(LimitExceeded, match="used more memory than it may"):
            template.render([{"role": "user", "content": "Hi"}])
        text = "y" * 4_000_000
        assert template.render([{"role": "user", "content": text}]) == f"{text}20000000"
    finally:
        template.close()
