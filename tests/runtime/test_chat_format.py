"""The strings between chat messages give the prompts that the template gives, or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_templates import FAMILIES
from click.testing import CliRunner
from fake_artifacts import make_artifact
from hypothesis import given, settings, strategies as st

from edgekit.cli import command
from edgekit.errors import EdgekitError, Unsupported
from edgekit.runtime.generation.chat_format import ChatFormat, chat_format
from edgekit.runtime.generation.chat_template import ChatTemplate, Message

SPECIAL = {"bos_token": "<b>", "eos_token": "<e>"}
TAKES_SYSTEM = {"llama 3": True, "mistral": False, "qwen": True, "smollm": True, "phi": True, "gemma": True}
CONTENTS = st.lists(st.text("ab \n\t<|>", min_size=1, max_size=8).filter(str.strip), min_size=4, max_size=4)


@pytest.fixture(scope="module")
def templates() -> dict[str, ChatTemplate]:
    return {family: ChatTemplate({"default": source}, SPECIAL) for family, source in FAMILIES.items()}


@pytest.fixture(scope="module")
def formats(templates: dict[str, ChatTemplate]) -> dict[str, ChatFormat]:
    return {family: chat_format(templates[family]) for family in TAKES_SYSTEM}


@pytest.mark.parametrize("family", TAKES_SYSTEM)
@settings(max_examples=20, deadline=None)
@given(CONTENTS)
def test_prompts_equal_the_templates(
    templates: dict[str, ChatTemplate], formats: dict[str, ChatFormat], family: str, contents: list[str]
) -> None:
    roles = ("system", "user", "assistant", "user")
    chat: list[Message] = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    found = formats[family]
    assert (found.system is not None) == TAKES_SYSTEM[family]
    assert found.render(chat[1:]) == templates[family].render(chat[1:])
    if found.system is not None:
        assert found.render(chat) == templates[family].render(chat)
    else:
        with pytest.raises(Unsupported, match="takes no system message"):
            found.render(chat)


def test_a_template_that_does_more_is_refused(templates: dict[str, ChatTemplate]) -> None:
    with pytest.raises(EdgekitError, match="render it with Jinja"):
        chat_format(templates["odd"])
    numbered = "{% for m in messages %}{{ loop.index }}{{ m.role }}{{ m.content }}{% endfor %}"
    with pytest.raises(Unsupported, match="more than strings between messages"):
        chat_format(ChatTemplate({"default": numbered}, {}))


def test_inspect_prints_the_strings(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["inspect", str(make_artifact(tmp_path / "artifact")), "--chat-format"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) == set(ChatFormat.model_fields) and found["ends"] == ["</s>"]
