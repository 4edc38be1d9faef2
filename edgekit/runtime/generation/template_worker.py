"""The worker process that renders chat templates, in a sandbox, since templates come with untrusted models.

The process does not import edgekit and may be killed at any time. It can open no files and use little memory; its
parent limits its time. The result equals the text of transformers byte for byte. Requests and answers are JSON,
each after its length in four bytes.
"""

from __future__ import annotations

import json
import mmap
import sys
from typing import Any

Reply = dict[str, Any]
# Address space in addition to the start's, and per byte of a request: rendering was measured to take 4 bytes.
RENDER_BYTES, BYTES_A_BYTE = 4 << 20, 12
MAX_MEMORY_BYTES = 512 << 20  # of address space in all
_REHEARSAL = (
    "{% macro m(x) %}{{ x | upper | trim | tojson(indent=1) }}{% endmacro %}{% set n = namespace(a='\\u00e9\\n') %}"
    "{% for y in one if y is string %}{{ m(y) }}{{ loop.index0 ~ n.a }}{% continue %}{% endfor %}"
    "{{ strftime_now('%d %b %Y') }}{% generation %}{{ '%s' % 1 }}{{ '{}'.format(2) }}{% endgeneration %}",
    "{{ 'a b' | wordwrap(1) }}{{ lipsum(n=1) }}{{ one | pprint }}{{ 'a.b' | urlize }}{{ one | random }}",
    "{{ nothing.at.all }}",
    "{{ ''.__class__ }}",
    "{{ raise_exception('x') }}",
    "{% if %}",
)


def serve() -> None:
    """Answer requests on stdin until it closes."""
    import datetime

    renderer = Renderer()
    # Load codecs, the time zone and jinja's error pages now, while files can still be opened.
    datetime.datetime.now().strftime("%c %Z")
    for template in _REHEARSAL:
        renderer.answer({"template": template, "values": {"one": ["é"]}, "limit_characters": 1000})
    before = _address_space()
    _confine()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(header := source.read(4)) == 4:
        size = int.from_bytes(header, "big")
        room = before + RENDER_BYTES + BYTES_A_BYTE * size if before else MAX_MEMORY_BYTES
        _limit("RLIMIT_AS", min(room, MAX_MEMORY_BYTES), MAX_MEMORY_BYTES)
        request = json.loads(source.read(size))
        data = json.dumps(renderer.answer(request) if request else {}).encode()
        sink.write(len(data).to_bytes(4, "big") + data)
        sink.flush()


class Renderer:
    """Render templates; the last one stays compiled."""

    def __init__(self) -> None:
        import jinja2.debug  # noqa: F401 - otherwise imported at the first error, when no file can be opened

        self._environment = _environment()
        self._compiled: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> Reply:
        """Return `{"text": ...}`, or `{"error": ..., "limit": ...}`; `limit` is true where a limit was exceeded."""
        try:
            source = request["template"]
            if source not in self._compiled:
                self._compiled = {source: self._environment.from_string(source)}
            parts: list[str] = []
            remaining = request["limit_characters"]
            for part in self._compiled[source].generate(**request["values"]):
                remaining -= len(part)
                if remaining < 0:
                    return {"error": f"wrote more than {request['limit_characters']:,} characters", "limit": True}
                parts.append(part)
            return {"text": "".join(parts)}
        except (MemoryError, RecursionError) as error:
            what = "memory" if isinstance(error, MemoryError) else "depth of calls"
            return {"error": f"used more {what} than it may", "limit": True}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500], "limit": False}


def _environment() -> Any:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the model's own text for training; here only its body is rendered."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own convention

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """A namespace that refuses names of the interpreter's own attributes."""

        def __init__(*arguments: Any, **values: Any) -> None:
            self, rest = arguments[0], arguments[1:]
            attributes = dict(*rest, **values)
            for name in attributes:
                _check_name(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not store the attribute {name!r} on a namespace")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = Namespace
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    import jinja2

    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - the name that templates use
    from datetime import datetime

    return datetime.now().strftime(format)


class _Dict:
    """`dict` for templates, without the attributes of the Python type."""

    def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
        return dict(*arguments, **values)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


def _confine() -> None:
    """Forbid new files, sockets and processes, and limit memory, where the OS can."""
    limits = {"RLIMIT_AS": MAX_MEMORY_BYTES, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0, "RLIMIT_NPROC": 0, "RLIMIT_NOFILE": 3}
    for name, value in limits.items():
        _limit(name, value, value)


def _limit(name: str, value: int, most: int) -> None:
    if sys.platform == "win32":
        return
    import resource

    try:
        resource.setrlimit(getattr(resource, name), (value, most))
    except (AttributeError, ValueError, OSError):
        return


def _address_space() -> int:
    """Return the bytes of address space that this process has; 0 where the OS does not say."""
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123 - pathlib takes memory
            return int(file.read().split()[0]) * mmap.PAGESIZE
    except (OSError, ValueError):
        return 0


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    serve()
