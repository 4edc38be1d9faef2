"""Chats, and templates written for the tests: in the manner of the supported families, and hostile ones."""
# ruff: noqa: E501 - templates are written as their authors write them

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = {
    path.stem: path.read_bytes().decode()
    for path in sorted((Path(__file__).parents[1] / "data/chat_templates").glob("*.jinja"))
}

ATTACKS = {
    "globals of a builtin": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ '' | attr('__class__') | attr('__mro__') }}",
    "attr filter by parts": "{{ () | attr('__cl' ~ 'ass__') | attr('__base__') | attr('__subclasses__')() }}",
    "map attribute": "{{ [''] | map(attribute='__class__') | list | first }}{{ [''] | map(attribute='__class__.__mro__') | first | list }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format by a stored method": "{% set f = '{0.__class__.__mro__}'.format %}{{ [f] | map('string') | list }}{{ f('') }}",
    "format as a filter argument": "{{ ['{0.__class__.__init__.__globals__}'] | map('format', cycler) | list }}{{ '{0.__class__.__mro__}'.format_map({'0': ''}) }}",
    "own macro": "{% macro m() %}{% endmacro %}{{ m.__globals__ }}{{ m._func.__globals__['os'] }}",
    "self": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context.environment.globals }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__init__.__globals__ }}",
    "dict type": "{{ dict.mro() }}{{ dict.__base__ }}",
    "helper globals": "{{ raise_exception.__globals__ }}",
    "strftime globals": "{{ strftime_now.__globals__.datetime }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "change a message": "{{ messages.append(1) }}{{ messages[0].update({'role': 'system'}) }}",
    "generator frame": "{% set g = (messages | map('upper')) %}{{ g.gi_frame.f_globals }}",
    "code object": "{{ (messages | map('upper')).gi_code.co_consts[0] }}{{ raise_exception.__code__.co_code }}",
}

BOMBS = {
    "an endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "an endless sum": "{% set ns = namespace(n=0) %}{% for a in range(99999) %}{% for b in range(99999) %}{% set ns.n = ns.n + 1 %}{% endfor %}{% endfor %}",
    "a gigabyte at once": "{{ 'x' * 1000000000 }}",
    "a gigabyte in pieces": "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "doubling": "{% set ns = namespace(s='xxxxxxxxxx') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "a huge number": "{{ 9 ** (9 ** 9) }}",
    "a huge range": "{{ range(10 ** 12) | list }}",
    "wide formatting": "{{ '%1000000000d' % 1 }}{{ '{:>999999999}'.format(1) }}",
    "wide filters": "{{ 'x' | center(2000000000) }}",
    "deep recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "a deep literal": "{{ " + "[" * 20000 + "]" * 20000 + " }}",
    "a deep expression": "{{ " + "not " * 50000 + "1 }}",
    "a recursive loop": "{% for a in [messages] recursive %}{{ loop([messages]) }}{% endfor %}",
    "lipsum": "{{ lipsum(n=100000, max=10000) }}",
    "a slow filter": "{% for a in range(99999) %}{{ (('a' ~ a) * 9999) | title | length }}{% endfor %}",
}  # fmt: skip

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather <now> in a "place" & é',
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": 'What\'s 2 < 3 & "why"?'}],
    "system and turns": [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": "Hello 🙂 日本 "},
        {"role": "user", "content": "Bye"},
    ],
    "reasoning": [
        {"role": "user", "content": "Think."},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nDone.", "reasoning": "because"},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "reasoning_content": "well", "content": "So."},
    ],
    "tool calls": [
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": '{"sky": "clear"}'},
        {"role": "assistant", "content": "Clear."},
    ],
    "parts": [
        {"role": "system", "content": [{"type": "text", "text": "Look."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is\nthis? "}]},
    ],
    "roles that do not take turns": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "empty": [{"role": "user", "content": ""}],
}

OPTIONS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False, "date_string": "1 May 2030"})
