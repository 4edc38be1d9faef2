"""Chats, and templates written for the tests: in the manner of the supported families, and hostile ones."""
# ruff: noqa: E501 - templates are written as their authors write them

from __future__ import annotations

from typing import Any

LLAMA3 = r"""{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now("%Y") %}{% else %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{% endif %}
{{- "Today: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {{- "You may call these functions. Answer with {\"name\": function, \"parameters\": arguments}.\n\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at a time, please") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{% endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must take turns: user, assistant, user, ...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is defined and tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{% endif %}
                    {%- if not loop.last %}{{- ", " }}{% endif %}
                {%- endfor %}
                {{- "}}" }}{% if not loop.last %}{{- ", " }}{% else %}{{- "]" }}{% endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{% endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] + ', "id": "' + (tool_call.id | default("000000000")) + '"}' }}
            {%- if not loop.last %}{{- ", " }}{% else %}{{- "]" + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""

QWEN = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {{- "# Tools\n\nSignatures stand within <tools></tools>:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nAnswer a call as\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{% endif %}
                {%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
                {{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{% else %}{{- tool_call.arguments | tojson }}{% endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""

SMOLLM = r"""{# a comment, and training marks #}
{%- set preface = "You are small and helpful." -%}
{% if messages[0].role != "system" -%}{{ "<|im_start|>system\n" + preface + "<|im_end|>\n" }}{%- endif -%}
{% macro fence(body) -%}<code>{{ body | indent(2, first=true) }}</code>{%- endmacro %}
{%- for message in messages if message.role not in ["ipython"] -%}
{%- if loop.index > 6 %}{% break %}{% endif -%}
{%- if message.content is not string and message.content is iterable -%}
{%- for part in message.content %}{% if part.type != "text" %}{% continue %}{% endif %}{{ fence(part.text) }}{% endfor -%}
{%- elif message.role == "assistant" -%}
<|im_start|>assistant
{% generation %}{{ message.content | trim }}<|im_end|>{% endgeneration %}

{% else -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if tools %}{{ tools | map(attribute="function") | map(attribute="name") | join(", ") | upper }}
{% endif -%}
{{ "<|im_start|>assistant\n" if add_generation_prompt else "" }}"""

PHI = r"""{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if tools %}{{ '<|tool|>' ~ tools | tojson(sort_keys=true, separators=[",", ":"]) ~ '<|/tool|>' }}{% endif %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

GEMMA = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

ODD = r"""{{ dict(a=1, b=messages[0].content) | tojson }}{{ dict.fromkeys("ab") | tojson }}{{ messages | tojson(indent=2, ensure_ascii=true) }}
{{- "%s-%d" | format("x", 3) }}{{ "{:>5}".format("y") }}{{ 3 | float }}{{ [1, none, true, "é"] }}{{ messages[0].missing }}
{{- messages[0] is defined }}{{ messages | length }}{{ messages | selectattr("role", "equalto", "user") | list | length }}
{%- set ns = namespace(self=1, count=0) %}{% for m in messages recursive %}{% set ns.count = ns.count + loop.index %}{% endfor %}{{ ns.count }}{{ ns.self }}
{{ "a<b>&'" | escape }}{{ "x" * 3 }}{{ messages[0].content[::-1] }}{{ range(3) | list }}{{ cycler("a", "b").next() }}{{ joiner(",")() }}
{% raw %}{{ not this }}{% endraw %}{{ documents }}{{ nothing_of_this }}{{ "é\n" | replace("é", "\u00e8") }}{{ lipsum is defined }}"""

FAMILIES = {
    "llama 3": LLAMA3, "mistral": MISTRAL, "qwen": QWEN, "smollm": SMOLLM, "phi": PHI, "gemma": GEMMA, "odd": ODD,
}  # fmt: skip

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
