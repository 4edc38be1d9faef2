"""Tools for chat templates without tool support: described in the system message, in the Hermes format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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


def with_described_tools(
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
