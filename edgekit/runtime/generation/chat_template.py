"""Render the model's own chat template in a worker process, which is killed when it exceeds its limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit.common.footprint import footprint_of
from edgekit.common.parsing import read_json, read_text
from edgekit.common.subprocesses import WORKER_BYTES, ChildProcess
from edgekit.errors import InvalidOption, InvalidPrompt, LimitExceeded, TemplateRefused, Unsupported, quote_short
from edgekit.model.tokenizer_file import MAX_TEMPLATE_BYTES
from edgekit.runtime.generation.template_worker import BYTES_A_BYTE, RENDER_BYTES

if TYPE_CHECKING:
    from edgekit.runtime.budget_share import BudgetShare

RENDER_LIMIT_S = 2.0
EXTRA_CHARACTERS = 1 << 20  # of a template's output, beyond its input
MAX_MESSAGES = 10_000
MAX_CHAT_BYTES = 32 << 20
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_READS_PARTS = ("is string", "is not string", "'type'", '"type"', ".type")  # in templates that join parts themselves
_REASONING = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]
# For templates without tool support: tools in the system message, in the Hermes format.
_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class ChatTemplate:
    """Render messages as the prompt that the model was trained on. Close it to end its worker.

    With a `share` of the memory budget, the worker takes what is free of its bytes with the first chat, and more for
    large ones while they are rendered.
    """

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], *, limit_s: float = RENDER_LIMIT_S
    ) -> None:
        self._sources, self._special = dict(sources), dict(special_tokens)
        self._worker = ChildProcess(Path(__file__).with_name("template_worker.py"), "the chat template", limit_s)
        self.share: BudgetShare | None = None
        self._is_counted = False

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        most_bytes: int = MAX_CHAT_BYTES,
    ) -> str:
        """Return the prompt. Raises TemplateRefused where the template fails, LimitExceeded past a limit.

        A chat of more than `most_bytes` is refused before it is rendered.
        """
        source = self._source(tools is not None)
        _check_chat_size([messages, tools, template_options], most_bytes)
        checked, listed = checked_messages(messages), _checked_tools(tools)
        try:
            if listed and "tools" not in source:
                checked, listed = _with_described_tools(checked, listed), None
            values = {
                **self._special,
                **_checked_options(template_options or {}),
                "messages": checked,
                "tools": listed,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            size = len(json.dumps(values, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidPrompt(f"messages: only plain JSON values can be rendered: {str(error)[:200]}") from error
        limit = EXTRA_CHARACTERS + 4 * size
        request = {"template": source, "values": values, "limit_characters": limit}
        self._count_worker()
        lent = BYTES_A_BYTE * (size + len(source))
        with self.share.lend(lent, "workers") if self.share and lent > RENDER_BYTES else nullcontext():
            answer = self._worker.ask(request, 6 * limit + 4096)  # JSON writes a character in six bytes at most
            if (process := self.process_id) and (footprint_of(process) or 0) > WORKER_BYTES + RENDER_BYTES:
                self._worker.restart()  # after a large chat it would keep what it took
        if "text" in answer:
            return str(answer["text"])
        error_class = LimitExceeded if answer.get("limit") else TemplateRefused
        raise error_class(f"the chat template refused: {answer.get('error')}")

    def _count_worker(self) -> None:
        """With the first chat, take as much of the worker's memory from the budget as is free."""
        if self.share is not None and not self._is_counted:
            self._is_counted, share = True, self.share
            share.exclusively(lambda: share.take_most(WORKER_BYTES + RENDER_BYTES, "workers"))

    def warm(self) -> None:
        """Start the worker in the background."""
        self._worker.start()

    def close(self) -> None:
        self._worker.close()

    @property
    def process_id(self) -> int | None:
        """The process id of the worker; None while it does not run."""
        return self._worker.process_id

    @property
    def exists(self) -> bool:
        """True where the model has a template."""
        return bool(self._sources)

    @property
    def source(self) -> str | None:
        """The text of the default template; None where there is none."""
        return self._sources.get("default")

    @property
    def special_tokens(self) -> dict[str, str]:
        """The text of each special token, by the name that templates use."""
        return dict(self._special)

    def readable(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with their parts of text joined, unless the template does that. Raises InvalidPrompt."""
        source = self._source(has_tools=False)
        reads_parts = any(sign in source for sign in _READS_PARTS)
        return [_readable(message, source, reads_parts) for message in messages]

    def _source(self, has_tools: bool) -> str:
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise Unsupported(
                f"the model has several chat templates and none is the default: {sorted(self._sources)}"
                if self._sources
                else "the model has no chat template; use `generate` (or --raw) with a plain prompt"
            )
        return self._sources[name]


def _check_chat_size(chat: object, most_bytes: int) -> None:
    """Raise for a chat that is too large, before anything is made of it. Every value counts as eight bytes or more."""
    size, waiting = 0, [chat]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping | list | tuple):
            size += 8 * len(value)
            if size <= most_bytes:
                waiting += [*value, *value.values()] if isinstance(value, Mapping) else value
        if size > most_bytes:
            raise InvalidPrompt(f"the chat has more than the {most_bytes:,} bytes that are rendered; shorten it")


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as templates expect them: without None values, with reasoning under each name in use."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidPrompt('messages must be a list with at least one {"role": ..., "content": ...}')
    if len(messages) > MAX_MESSAGES:
        raise InvalidPrompt(f"{len(messages):,} messages; at most {MAX_MESSAGES:,} are rendered")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidPrompt(f"messages[{index}] must be an object with a role, found {quote_short(message)}")
        plain = {name: value for name, value in message.items() if value is not None}
        if "content" not in plain and plain["role"] in ("system", "user"):
            raise InvalidPrompt(f"messages[{index}]: a message of role {plain['role']} needs content")
        reasoning = next((plain[name] for name in _REASONING if name in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        checked.append(plain)
    return checked


def _readable(message: Message, source: str, reads_parts: bool) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES and not any(f"{quote}{role}{quote}" in source for quote in "'\""):
        raise InvalidPrompt(f"role {quote_short(role)}: is none of {', '.join(_ROLES)}, nor of the model's template")
    if reads_parts or not isinstance(content, list | tuple):
        return message
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") not in _TEXT_PARTS
            or not isinstance(part.get("text"), str)
        ):
            raise InvalidPrompt(f"part {quote_short(part)}: this model reads only text; give parts of type text")
    return {**message, "content": "".join(part["text"] for part in content)}


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidOption(
                f"tools[{index}] must be a JSON object that describes a function, found {quote_short(tool)}"
            )
    return [dict(tool) for tool in tools]


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in options:
        if not isinstance(name, str) or not name.isidentifier() or name in _OWN_NAMES or name in _SPECIAL:
            raise InvalidOption(
                f"template_options: {quote_short(name)} cannot be set; choose a name that the template reads"
            )
    return dict(options)


def read_template(folder: Path) -> ChatTemplate:
    """Read the chat template of an artifact. Without one, every rendering is refused."""
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json(config_path) if config_path.exists() else {}
    sources: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        sources["default"] = listed
    elif isinstance(listed, list):
        named = (each for each in listed if isinstance(each, dict) and {"name", "template"} <= set(each))
        sources |= {str(each["name"]): str(each["template"]) for each in named}
    if template_path.exists():
        sources["default"] = read_text(template_path, MAX_TEMPLATE_BYTES)
    special = {name: _token_text(config.get(name)) for name in _SPECIAL}
    return ChatTemplate(sources, {name: text for name, text in special.items() if text is not None})


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _with_described_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return `messages` in which tools, their calls and their results are text.

    Results become messages of the user, since such templates often refuse the role `tool`.
    """
    description = _DESCRIPTION.format(tools="\n".join(_json(tool) for tool in tools))
    first, rest = messages[0], messages[1:]
    if first["role"] == "system" and isinstance(first.get("content"), str):
        described = [{**first, "content": f"{first['content']}\n\n{description}"}]
    else:
        described, rest = [{"role": "system", "content": description}], messages
    for message in rest:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if described[-1]["role"] == "tool":
                described[-1]["content"] += f"\n{text}"
            else:
                described.append({"role": "tool", "content": text})
        elif message.get("tool_calls"):
            calls = "\n".join(f"<tool_call>\n{_call(each)}\n</tool_call>" for each in message["tool_calls"])
            text = f"{message['content']}\n{calls}" if message.get("content") else calls
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            described.append({**kept, "content": text})
        else:
            described.append(dict(message))
    return [{**each, "role": "user"} if each["role"] == "tool" else each for each in described]


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    return _json({"name": function.get("name"), "arguments": function.get("arguments", {})})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
