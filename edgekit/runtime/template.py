"""The model's own chat template, rendered in a worker process that stays warm and is killed past its limits.

It knows nothing of tokenizers; `template_worker` is the program that it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgekit.errors import InvalidInput, LimitExceeded, Unsupported, clip
from edgekit.reading import read_bytes, read_json
from edgekit.runtime.worker import Worker

RENDER_LIMIT_S = 2.0
SPARE_CHARACTERS = 1 << 20  # what a template may write beyond what it was given
MAX_TEMPLATE_BYTES = 1 << 20
MAX_MESSAGES = 10_000
MAX_CHAT_BYTES = 32 << 20
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_REASONING = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


class ChatTemplate:
    """Turns messages into the prompt that the model was trained on. Close it to end its worker."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], *, limit_s: float = RENDER_LIMIT_S
    ) -> None:
        self._sources, self._special = dict(sources), dict(special_tokens)
        self._worker = Worker(Path(__file__).with_name("template_worker.py"), "the chat template", limit_s)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt; what the template refuses is InvalidInput, what runs past a limit LimitExceeded."""
        source = self._source(tools is not None)
        values = {
            **self._special,
            **_checked_options(template_options or {}),
            "messages": checked_messages(messages),
            "tools": _checked_tools(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if tools is not None and "tools" not in source:
            raise Unsupported(
                "the model's chat template takes no tools; ask without them or describe them in a message"
            )
        try:
            size = len(json.dumps(values, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"messages: only plain JSON values can be rendered: {str(error)[:200]}") from error
        if size > MAX_CHAT_BYTES:
            raise InvalidInput(f"the chat has {size:,} bytes; at most {MAX_CHAT_BYTES:,} are rendered")
        limit = SPARE_CHARACTERS + 4 * size
        request = {"template": source, "values": values, "limit_characters": limit}
        answer = self._worker.ask(request, 6 * limit + 4096)  # JSON writes a character in six bytes at most
        if "text" in answer:
            return str(answer["text"])
        kind = LimitExceeded if answer.get("limit") else InvalidInput
        raise kind(f"the chat template refused: {answer.get('error')}")

    def warm(self) -> None:
        """Start the worker now, without waiting for it."""
        self._worker.start()

    def close(self) -> None:
        self._worker.close()

    @property
    def exists(self) -> bool:
        """Whether the model has a template at all."""
        return bool(self._sources)

    def _source(self, has_tools: bool) -> str:
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise Unsupported(
                f"the model has several chat templates and none is the default: {sorted(self._sources)}"
                if self._sources
                else "the model has no chat template; use `generate` (or --raw) with a plain prompt"
            )
        return self._sources[name]


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates see them: fields without a value are absent, reasoning stands under each of its names."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidInput('messages must be a list with at least one {"role": ..., "content": ...}')
    if len(messages) > MAX_MESSAGES:
        raise InvalidInput(f"{len(messages):,} messages; at most {MAX_MESSAGES:,} are rendered")
    found = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidInput(f"messages[{place}] must be an object with a role, found {clip(message)}")
        plain = {name: value for name, value in message.items() if value is not None}
        reasoning = next((plain[name] for name in _REASONING if name in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        found.append(plain)
    return found


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    for place, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidInput(f"tools[{place}] must be a JSON object that describes a function, found {clip(tool)}")
    return [dict(tool) for tool in tools]


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in options:
        if not isinstance(name, str) or not name.isidentifier() or name in _OWN_NAMES or name in _SPECIAL:
            raise InvalidInput(f"template_options: {clip(name)} cannot be set; choose a name that the template reads")
    return dict(options)


def read_template(folder: Path) -> ChatTemplate:
    """The chat template of an artifact; one without sources where it has none."""
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json(config_path) if config_path.exists() else {}
    sources: dict[str, str] = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        sources["default"] = listed
    elif isinstance(listed, list):
        sources |= {str(one["name"]): str(one["template"]) for one in listed if {"name", "template"} <= set(one)}
    if template_path.exists():
        sources["default"] = read_bytes(template_path, MAX_TEMPLATE_BYTES).decode()
    special = {name: _token_text(config.get(name)) for name in _SPECIAL}
    return ChatTemplate(sources, {name: text for name, text in special.items() if text is not None})


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
