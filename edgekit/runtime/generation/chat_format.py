"""Chat templates as plain strings between messages, for apps without Jinja. Refused where prompts would differ."""

from __future__ import annotations

from collections.abc import Sequence

from edgekit.common.base import Frozen
from edgekit.errors import TemplateRefused, Unsupported
from edgekit.runtime.generation.chat_template import ChatTemplate, Message

_CONTENTS = ("first§one", "second§two", "third§three", "fourth§four", "fifth§five")
_SYSTEM = "system§rules"


class ChatFormat(Frozen):
    """The strings before, between and after the contents of messages. The last message is a user's."""

    first: str
    """Text before the user's first message, without a system message."""
    system: tuple[str, str] | None
    """Text before and after a system message. None: the template takes no system message."""
    user_to_assistant: str
    assistant_to_user: str
    last: str
    """Text after the user's last message; the model continues."""
    strips: tuple[str, ...]
    """Roles whose contents are stripped of white space at both ends."""
    ends: tuple[str, ...] = ()
    """Texts of tokens that end an answer. ExecuTorch's runners write the one that came, and an app leaves it out."""

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt for an optional system message, followed by alternating user and assistant messages."""
        contents: list[str] = [
            each["content"].strip() if each["role"] in self.strips else each["content"] for each in messages
        ]
        text = self.first
        if messages[0]["role"] == "system":
            if self.system is None:
                raise Unsupported("the chat template takes no system message")
            text = self.system[0] + contents.pop(0) + self.system[1]
        for index, content in enumerate(contents[:-1]):
            text += content + (self.assistant_to_user if index % 2 else self.user_to_assistant)
        return text + contents[-1] + self.last


def chat_format(template: ChatTemplate, ends: Sequence[str] = ()) -> ChatFormat:
    """Return the strings of a template. Raises `Unsupported` if it does more than put strings between messages."""
    first, asked, answered, last = _cut(template.render(_turns(3)), _CONTENTS[:3])
    strips = tuple(role for role in ("user", "assistant") if _strips(template, role))
    found = ChatFormat(
        first=first, system=None, user_to_assistant=asked, assistant_to_user=answered, last=last, strips=strips,
        ends=tuple(ends),
    )  # fmt: skip
    if not _agree(found, template, []):
        raise Unsupported("the chat template is more than strings between messages; render it with Jinja")
    try:
        before, after, _ = _cut(template.render([_message("system", _SYSTEM), *_turns(1)]), (_SYSTEM, _CONTENTS[0]))
        roles = (*strips, "system") if _strips(template, "system") else strips
        with_system = found.model_copy(update={"system": (before, after), "strips": roles})
        return with_system if _agree(with_system, template, [_message("system", _SYSTEM)]) else found
    except TemplateRefused:
        return found


def _agree(found: ChatFormat, template: ChatTemplate, before: list[Message]) -> bool:
    """Return True if the strings give the template's prompts, for contents with and without white space around them."""
    chats = [before + _turns(count) for count in (1, 3, 5)]
    padded = [[_message(each["role"], f"\n {each['content']}\n ") for each in chat] for chat in chats]
    return all(found.render(chat) == template.render(chat) for chat in [*chats, *padded])


def _strips(template: ChatTemplate, role: str) -> bool:
    chat = [_message("system", _SYSTEM)] * (role == "system") + _turns(3)
    padded = [_message(each["role"], f" {each['content']} ") if each["role"] == role else each for each in chat]
    return template.render(chat) == template.render(padded)


def _cut(text: str, contents: Sequence[str]) -> list[str]:
    """Split `text` at `contents`, each of which must occur once and in order; return the strings around them."""
    parts = []
    for content in contents:
        before, found, text = text.partition(content)
        if not found or content in text:
            raise Unsupported("the chat template does not write each message once, in order; render it with Jinja")
        parts.append(before)
    return [*parts, text]


def _turns(count: int) -> list[Message]:
    return [_message(("user", "assistant")[index % 2], _CONTENTS[index]) for index in range(count)]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
