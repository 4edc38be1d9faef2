"""Calls the library's C API: tokenizers, and models that generate text from tokens."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgekit.contracts.native_loop import NativeAnswer, NativeMemory
from edgekit.errors import InvalidInput, TargetMissing

_OnText = CFUNCTYPE(None, c_void_p, POINTER(c_char), c_size_t)
_REASONS = ("stop", "length", "cancelled")


class _Options(Structure):
    _fields_ = (
        ("max_tokens", c_int64),
        ("stops", POINTER(c_char_p)),
        ("stop_count", c_size_t),
        ("ignores_ends", c_int),
        ("begins_text", c_int),
        ("reuses_prefix", c_int),
        ("draft_tokens", c_int64),
        ("temperature", c_double),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("min_p", c_double),
        ("typical_p", c_double),
        ("repetition_penalty", c_double),
        ("presence_penalty", c_double),
        ("frequency_penalty", c_double),
        ("seed", c_uint64),
        ("on_text", _OnText),
        ("context", c_void_p),
    )


class _Answer(Structure):
    _fields_ = (
        ("text", POINTER(c_char)),
        ("bytes", c_size_t),
        ("tokens", POINTER(c_int32)),
        ("count", c_size_t),
        ("prompt_tokens", c_size_t),
        ("cached_tokens", c_size_t),
        ("drafted_tokens", c_size_t),
        ("accepted_tokens", c_size_t),
        ("reason", c_int),
        ("prefill_s", c_double),
        ("decode_s", c_double),
    )


class _Memory(Structure):
    _fields_ = tuple(
        (name, c_int64)
        for name in (
            "weights", "engine", "cache", "cache_used", "activations", "process_private", "process_peak"
        )
    )  # fmt: skip


class _Chat(Structure):
    _fields_ = (
        ("messages", c_char_p),
        ("tools", c_char_p),
        ("options", c_char_p),
        ("adds_generation_prompt", c_int),
    )


_IDS = POINTER(c_int32)
API_VERSION = 4  # as in edgekit_native.h
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "edgekit_api_version": (c_int, []),
    "edgekit_last_error": (c_char_p, []),
    "edgekit_tokenizer_open": (c_void_p, [c_char_p, c_size_t]),
    "edgekit_tokenizer_close": (None, [c_void_p]),
    "edgekit_encode": (c_int64, [c_void_p, c_char_p, c_size_t, c_int, _IDS, c_size_t]),
    "edgekit_decode": (c_int64, [c_void_p, _IDS, c_size_t, c_int, POINTER(c_char), c_size_t]),
    "edgekit_template_open": (c_void_p, [c_char_p, c_size_t, c_char_p, c_size_t]),
    "edgekit_template_close": (None, [c_void_p]),
    "edgekit_render": (c_int64, [c_void_p, POINTER(_Chat), POINTER(c_char), c_size_t]),
    "edgekit_verify": (c_int, [c_char_p]),
    "edgekit_pack": (c_int, [c_char_p, c_char_p, c_char_p]),
    "edgekit_open": (c_void_p, [c_char_p, c_char_p, c_int, c_int, c_char_p]),
    "edgekit_close": (None, [c_void_p]),
    "edgekit_tokenizer_of": (c_void_p, [c_void_p]),
    "edgekit_template_of": (c_void_p, [c_void_p]),
    "edgekit_default_options": (_Options, []),
    "edgekit_generate": (c_int, [c_void_p, _IDS, c_size_t, POINTER(_Options), POINTER(_Answer)]),
    "edgekit_memory_of": (c_int, [c_void_p, POINTER(_Memory)]),
    "edgekit_cancel": (None, [c_void_p]),
}


class NativeLibrary:
    """The loaded library. Its errors are raised as `InvalidInput`."""

    def __init__(self, path: Path) -> None:
        """Raises `TargetMissing` for a file that cannot be loaded or has another API."""
        self.path = path
        try:
            self.functions = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self.functions, name)
                function.restype, function.argtypes = result, arguments
            found = self.functions.edgekit_api_version()
        except (OSError, AttributeError) as error:
            raise TargetMissing(f"{path} is not edgekit's native library: {str(error)[:200]}") from error
        if found != API_VERSION:
            raise TargetMissing(
                f"{path} has version {found} of the native API, this edgekit {API_VERSION}; install the edgekit-native"
                " of this edgekit"
            )

    def error(self) -> InvalidInput:
        return InvalidInput(self.functions.edgekit_last_error().decode("utf-8", "replace"))

    def text(self, write: Callable[[Any, int], int]) -> str:
        """Return the text that `write` writes into a buffer; a second call gets a buffer of the needed size."""
        place = (c_char * 1024)()
        for _ in range(2):
            size = write(place, len(place))
            if size < 0:
                raise self.error()
            if size <= len(place):
                break
            place = (c_char * size)()
        return place.raw[:size].decode()

    def read_tokenizer(self, data: bytes) -> NativeTokenizer:
        """Read the bytes of a tokenizer.json."""
        handle = self.functions.edgekit_tokenizer_open(data, len(data))
        if not handle:
            raise self.error()
        return NativeTokenizer(self, handle, owner=None)

    def read_template(self, config: bytes | None, jinja: bytes | None) -> NativeTemplate:
        """Read the bytes of a tokenizer_config.json and of a chat_template.jinja; None: there is none."""
        sizes = [len(each or b"") for each in (config, jinja)]
        handle = self.functions.edgekit_template_open(config, sizes[0], jinja, sizes[1])
        if not handle:
            raise self.error()
        return NativeTemplate(self, handle, owner=None)

    def verify(self, folder: Path) -> None:
        """Check every byte of an artifact of any target."""
        if self.functions.edgekit_verify(str(folder).encode()) != 0:
            raise self.error()

    def pack(self, folder: Path, packed: Path) -> None:
        """Pack an artifact's weights for the onnxruntime of this Python into the folder `packed`."""
        places = [str(place).encode() for place in (folder, onnxruntime_library(), packed)]
        if self.functions.edgekit_pack(*places) != 0:
            raise self.error()

    def open(
        self,
        folder: Path,
        *,
        runtime: Path | str | None = None,
        threads: int = 0,
        exact: bool = False,
        packed: Path | None = None,
    ) -> NativeModel:
        """Open an artifact; None: the onnxruntime of this Python. 0 threads: as many as the plan says.

        `packed`: a folder that `pack` made, whose weights are mapped; None: they are packed into private memory.
        For a program of ExecuTorch, `runtime` is a library with its operators; an empty text: the library's own.
        """
        library = onnxruntime_library() if runtime is None else runtime
        places = [None if place is None else str(place).encode() for place in (folder, library, packed)]
        handle = self.functions.edgekit_open(places[0], places[1], threads, exact, places[2])
        if not handle:
            raise self.error()
        return NativeModel(self, handle)


class NativeTokenizer:
    """A tokenizer. If it belongs to a model, it must not outlive the model."""

    def __init__(self, library: NativeLibrary, handle: int, owner: NativeModel | None) -> None:
        self._library, self._handle, self._owner = library, handle, owner

    def encode(self, text: str | bytes, *, add_special_tokens: bool = False) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        tokens = (c_int32 * (len(data) + 64))()
        for _ in range(2):  # a normaliser may make the text longer
            count = self._library.functions.edgekit_encode(
                self._handle, data, len(data), add_special_tokens, tokens, len(tokens)
            )
            if count < 0:
                raise self._library.error()
            if count <= len(tokens):
                break
            tokens = (c_int32 * count)()
        return list(tokens[:count])

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        given, decode = (c_int32 * len(tokens))(*tokens), self._library.functions.edgekit_decode
        return self._library.text(
            lambda text, capacity: decode(self._handle, given, len(given), skip_special, text, capacity)
        )

    def close(self) -> None:
        """Free the object, unless a model owns it. Closing twice is allowed."""
        handle, self._handle = self._handle, 0
        if self._owner is None:
            self._library.functions.edgekit_tokenizer_close(handle)


class NativeTemplate:
    """A chat template. If it belongs to a model, it must not outlive the model."""

    def __init__(self, library: NativeLibrary, handle: int, owner: NativeModel | None) -> None:
        self._library, self._handle, self._owner = library, handle, owner

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt."""
        given = [None if each is None else json.dumps(each).encode() for each in (messages, tools, template_options)]
        chat, render = _Chat(*given, add_generation_prompt), self._library.functions.edgekit_render
        return self._library.text(lambda text, capacity: render(self._handle, byref(chat), text, capacity))

    def close(self) -> None:
        """Free the object, unless a model owns it. Closing twice is allowed."""
        handle, self._handle = self._handle, 0
        if self._owner is None:
            self._library.functions.edgekit_template_close(handle)


class NativeModel:
    """An opened artifact."""

    def __init__(self, library: NativeLibrary, handle: int) -> None:
        self._library, self._handle = library, handle
        self.tokenizer = NativeTokenizer(library, library.functions.edgekit_tokenizer_of(handle), self)
        self.template = NativeTemplate(library, library.functions.edgekit_template_of(handle), self)

    def generate(
        self,
        tokens: Sequence[int],
        *,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
        **options: float,
    ) -> NativeAnswer:
        """Answer a prompt of tokens; `options` are the fields of `edgekit_options`."""
        made: _Options = self._library.functions.edgekit_default_options()
        unknown = options.keys() - {name for name, _ in _Options._fields_}
        if unknown:
            raise InvalidInput(f"{min(unknown)}: is no option of the native library")
        for name, value in options.items():
            setattr(made, name, value)
        made.stops, made.stop_count = (c_char_p * len(stop))(*(each.encode() for each in stop)), len(stop)

        def forward(context: object, text: Any, size: int) -> None:
            if on_text is not None:
                on_text(text[:size].decode())

        made.on_text = callback = _OnText(forward)
        answer, given = _Answer(), (c_int32 * len(tokens))(*tokens)
        failed = self._library.functions.edgekit_generate(self._handle, given, len(given), byref(made), byref(answer))
        del callback  # it had to live until here
        if failed:
            raise self._library.error()
        return NativeAnswer(
            text=answer.text[: answer.bytes].decode(),
            tokens=tuple(answer.tokens[: answer.count]),
            finish_reason=_REASONS[answer.reason],
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            drafted_tokens=answer.drafted_tokens,
            accepted_tokens=answer.accepted_tokens,
            prefill_s=answer.prefill_s,
            decode_s=answer.decode_s,
        )

    def memory(self) -> NativeMemory:
        """Measure the model's memory now. Takes milliseconds."""
        found = _Memory()
        if self._library.functions.edgekit_memory_of(self._handle, byref(found)):
            raise self._library.error()
        sizes = {name: getattr(found, name) for name in NativeMemory._fields}
        counted: dict[str, Any] = {name: None if size < 0 else size for name, size in sizes.items()}
        return NativeMemory(**counted)

    def cancel(self) -> None:
        """End the answer that is being generated; any thread may call it."""
        self._library.functions.edgekit_cancel(self._handle)

    def close(self) -> None:
        """Free the model. Closing twice is allowed."""
        handle, self._handle = self._handle, 0
        self._library.functions.edgekit_close(handle)


def onnxruntime_library() -> Path:
    """The shared library inside the package onnxruntime, which is not imported."""
    found = find_spec("onnxruntime")
    folders = [Path(each) / "capi" for each in (found.submodule_search_locations or ())] if found else []
    for pattern in ("libonnxruntime.so.*", "libonnxruntime.*.dylib", "libonnxruntime.dylib"):
        for folder in folders:
            paths = sorted(folder.glob(pattern))
            if paths:
                return paths[0]
    raise TargetMissing("onnxruntime's shared library is not installed; pip install 'edgekit[onnx]'")
