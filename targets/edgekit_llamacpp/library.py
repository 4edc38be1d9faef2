"""Finds llama.cpp's library, checks that it is the supported build, and declares its functions.

`EDGEKIT_LLAMA_LIB` may name a library file; otherwise it is the one inside the package xllamacpp, which is opened as a
C library and never imported. Two copies of llama.cpp in one process share symbols and crash, so a second is refused.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_void_p,
    sizeof,
)
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from edgekit.common.files import file_sha256
from edgekit.common.machine_facts import is_marked, mark
from edgekit.common.packages import version_of
from edgekit.common.proc import cpuinfo
from edgekit.enginekit.spinning import spin_us
from edgekit.errors import TargetFailed, TargetMissing
from edgekit_llamacpp import structs

PACKAGE, PINNED = "xllamacpp", "2026.10.11549"
LIBRARY_SETTING = "EDGEKIT_LLAMA_LIB"
VERSIONS = {"llama_version": "0.6.0-dev", "ggml_version": "0.26.0"}  # as the pinned build states them
OTHER_BINDINGS = ("llama_cpp", "xllamacpp", "cyllama", "easy_llama", "gpt4all", "ctransformers", "llama_cpp_py_sync")
_PREFIX, _INSTALL = "llamacpp: ", "pip install 'edgekit[llamacpp]'"
_SPINNING = "GOMP_SPINCOUNT"
_SPINS_A_MICROSECOND = 50  # spins of one processor pause each
_KEPT_LOG_LINES = 20
_WARNING = 3  # GGML_LOG_LEVEL_WARN; 5 continues the line before
_FILE_NAMES = ("libllama.so", "libllama.dylib", "llama.dll")
_FOLDERS = (".", "lib", "bin")  # llama-cpp-python has its library in lib, CMake in bin
_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_BACKEND_SETTING = "GGML_BACKEND_PATH"  # llama.cpp's own: a file of kernels elsewhere
_TRIAL, _TRIED, _TRIAL_S = "llama-library", {"works": True, "trial": 1}, 120

_POINTER = c_void_p
# name → result, arguments
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [structs.LogCallback, _POINTER]),
    "llama_model_default_params": (structs.ModelParams, []),
    "llama_context_default_params": (structs.ContextParams, []),
    "llama_model_load_from_file": (_POINTER, [c_char_p, structs.ModelParams]),
    "llama_model_free": (None, [_POINTER]),
    "llama_model_get_vocab": (_POINTER, [_POINTER]),
    "llama_vocab_n_tokens": (c_int32, [_POINTER]),
    "llama_init_from_model": (_POINTER, [_POINTER, structs.ContextParams]),
    "llama_free": (None, [_POINTER]),
    "llama_set_n_threads": (None, [_POINTER, c_int32, c_int32]),
    "llama_n_ctx_seq": (c_uint32, [_POINTER]),
    "llama_get_memory": (_POINTER, [_POINTER]),
    "llama_memory_can_shift": (c_bool, [_POINTER]),
    "llama_memory_clear": (None, [_POINTER, c_bool]),
    "llama_memory_seq_rm": (c_bool, [_POINTER, c_int32, c_int32, c_int32]),
    "llama_memory_seq_add": (None, [_POINTER, c_int32, c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [_POINTER, structs.TokenBatch]),
    "llama_get_logits_ith": (POINTER(c_float), [_POINTER, c_int32]),
    "llama_state_seq_get_size_ext": (c_size_t, [_POINTER, c_int32, c_uint32]),
    "llama_state_seq_get_data_ext": (c_size_t, [_POINTER, POINTER(c_uint8), c_size_t, c_int32, c_uint32]),
    "llama_state_seq_set_data_ext": (c_size_t, [_POINTER, POINTER(c_uint8), c_size_t, c_int32, c_uint32]),
    "llama_adapter_lora_init": (_POINTER, [_POINTER, c_char_p]),
    "llama_adapter_lora_free": (None, [_POINTER]),
    "ggml_quantize_chunk": (
        c_size_t,
        [c_int32, POINTER(c_float), c_void_p, c_int64, c_int64, c_int64, POINTER(c_float)],
    ),
    "llama_set_adapters_lora": (c_int32, [_POINTER, POINTER(_POINTER), c_size_t, POINTER(c_float)]),
    "ggml_backend_reg_count": (c_size_t, []),
    "ggml_backend_load_all_from_path": (None, [c_char_p]),
    "ggml_backend_dev_by_type": (_POINTER, [c_int32]),
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_backend_dev_get": (_POINTER, [c_size_t]),
    "ggml_backend_dev_type": (c_int32, [_POINTER]),
    "ggml_backend_dev_name": (c_char_p, [_POINTER]),
    "ggml_backend_dev_description": (c_char_p, [_POINTER]),
    "ggml_backend_dev_memory": (None, [_POINTER, POINTER(c_size_t), POINTER(c_size_t)]),
    "llama_supports_gpu_offload": (c_bool, []),
}


class Library:
    """The opened library; its functions are attributes."""

    def __init__(self, path: Path, functions: ctypes.CDLL) -> None:
        self.path, self._functions = path, functions
        self.log: deque[str] = deque(maxlen=_KEPT_LOG_LINES)
        self._callback = structs.LogCallback(self._keep)  # referenced here, because it must live as long as the library
        self.llama_log_set(self._callback, None)
        if not self._has_kernels():
            self.llama_log_set(structs.LogCallback(), None)
            raise TargetMissing(
                f"{_PREFIX}{path.name} has no kernels for this processor, and none lie next to it; {_cure()}"
            )
        self.llama_backend_init()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self._functions, name)
        return function

    @property
    def version(self) -> str:
        """A text that identifies the build."""
        if not os.environ.get(LIBRARY_SETTING):
            return f"{PACKAGE} {PINNED}"
        return f"{LIBRARY_SETTING} {_versions(self._functions)} {_hash_of(self.path)[:12]}"

    def _has_kernels(self) -> bool:
        """Load the kernels of a build that keeps them in files in its folder; return False if none is for the CPU.

        llama.cpp itself would look for those files in Python's folder and in the current one.
        """
        if not self.ggml_backend_reg_count():
            self.ggml_backend_load_all_from_path(bytes(self.path.resolve().parent))
        return bool(self.ggml_backend_dev_by_type(_CPU))

    def failure(self, what: str) -> TargetFailed:
        """Return the error for a failed call, with the library's last warning."""
        reason = self.log[-1] if self.log else "it gave no reason"
        return TargetFailed(f"llamacpp: {what}: {reason[:300]}")

    def _keep(self, level: int, text: bytes, _: Any) -> None:
        if level >= _WARNING and (line := text.decode(errors="replace").strip()):
            self.log.append(line)


@cache
def _hash_of(path: Path) -> str:
    """Return a hash of the library and of its kernels: two builds of one version may sum in different orders."""
    files = {path.resolve(), *(file.resolve() for file in path.resolve().parent.glob("*ggml*") if file.is_file())}
    if elsewhere := os.environ.get(_BACKEND_SETTING):
        files.add(Path(elsewhere).resolve())
    hashes = " ".join(file_sha256(file) for file in sorted(files) if file.is_file())
    return hashlib.sha256(hashes.encode()).hexdigest()


def missing() -> str | None:
    """Return the reason why the library cannot be used here, with the fix; None if it can.

    A library that the user named is opened, because nothing else says which build it is.
    """
    if os.environ.get(LIBRARY_SETTING):
        try:
            load()
        except TargetMissing as error:
            return str(error).removeprefix(_PREFIX)
        return None
    return _missing_package()


def _missing_package() -> str | None:
    if sys.platform == "win32":
        return "xllamacpp's library for Windows does not export llama.cpp's C API; use --target onnx here"
    found = version_of(PACKAGE)
    if found is None:
        return f"{PACKAGE} is not installed; {_INSTALL}"
    if found != PINNED:
        return f"{PACKAGE} {found} is installed and {PINNED} is supported: its structs differ; {_INSTALL}"
    if _library_of_package() is None:
        return f"{PACKAGE} is registered but its library is gone; pip install --force-reinstall {PACKAGE}=={PINNED}"
    if not _has_avx2():
        return f"{PACKAGE} is built for AVX2, which this processor lacks; use --target onnx here"
    if sys.platform == "linux" and not _opens_libgomp():
        return "the system lacks libgomp.so.1, which llama.cpp needs; apt-get install libgomp1 (or your system's)"
    return None


@cache
def load() -> Library:
    """Open and check the library, once for each process. Raises `TargetMissing` if it cannot be used."""
    if own := _named():
        _try_out(own)
    return opened()


def _named() -> Path | None:
    """Return the library that the user named, by its file or by its folder; None if none was named."""
    named = os.environ.get(LIBRARY_SETTING)
    if not named:
        return None
    if not Path(named).is_dir():
        return Path(named)
    places = (Path(named) / below / name for below in _FOLDERS for name in _FILE_NAMES)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise TargetMissing(f"{_PREFIX}{LIBRARY_SETTING}: {named} holds no {' or '.join(_FILE_NAMES)}; name the file")
    return found


def _try_out(path: Path) -> None:
    """Run `trial` in a separate process, once for each build and machine."""
    in_app = getattr(sys, "frozen", False) or not sys.executable  # no Python to start
    if in_app or not path.is_file() or is_marked(_hash_of(path), _TRIAL, _TRIED):
        return
    command = [sys.executable, "-P", "-m", "edgekit_llamacpp.trial"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_TRIAL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TargetMissing(f"{_PREFIX}{path.name} could not be tried: {error}; {_cure()}") from error
    if done.returncode < 0:
        raise TargetMissing(
            f"{_PREFIX}{path.name} ended a trial process by signal {-done.returncode}: it was compiled for another "
            f"processor, or wrongly (GGML_NATIVE=OFF helps); {_cure()}"
        )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["the trial gave no reason"]
        raise TargetMissing(_PREFIX + lines[-1][:500].removeprefix(_PREFIX))
    mark(_hash_of(path), _TRIAL, _TRIED)


def opened() -> Library:
    """Open and check the library without a trial. Raises `TargetMissing` if it cannot be used."""
    own = _named()
    if own and not own.is_file():
        raise TargetMissing(f"{_PREFIX}{LIBRARY_SETTING}: {own} is not a file; name llama.cpp's library")
    reason = None if own else _missing_package()
    if reason:
        raise TargetMissing(f"{_PREFIX}{reason}")
    foreign = next((name for name in OTHER_BINDINGS if name in sys.modules), None)
    if foreign:
        raise TargetMissing(
            f"{_PREFIX}{foreign} has loaded another llama.cpp into this process, and two would crash; "
            "use them in processes of their own"
        )
    if own and sys.platform == "linux":
        _opens_libgomp()  # for its setting; a library without OpenMP needs none
    path = own or Path(str(_library_of_package()))
    # Otherwise a failed assertion would start a debugger on this process.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        functions = ctypes.CDLL(str(path), mode=getattr(os, "RTLD_LOCAL", 0) | getattr(os, "RTLD_NOW", 0))
    except OSError as error:
        raise TargetMissing(f"{_PREFIX}{path.name} cannot be opened: {str(error)[:200]}; {_cure()}") from error
    _declare(functions, path)
    _check(functions, path)
    return Library(path, functions)


def _library_of_package() -> Path | None:
    try:
        listed = files(PACKAGE) or []
    except PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in listed if file.name.endswith((".so", ".dylib"))]
    return next((path for path in paths if path.is_file()), None)


def _has_avx2() -> bool:
    """Return False on an x86 Linux machine without AVX2; other machines are not checked."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return True
    flags = cpuinfo("flags").split()
    return not flags or "avx2" in flags


def _opens_libgomp() -> bool:
    """Load the OpenMP library, which reads only now how long an idle thread spins before it sleeps."""
    before = os.environ.get(_SPINNING)
    if before is None:
        os.environ[_SPINNING] = str(spin_us() * _SPINS_A_MICROSECOND)
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        return False
    finally:
        if before is None:
            os.environ.pop(_SPINNING, None)
    return True


def _declare(functions: ctypes.CDLL, path: Path) -> None:
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = getattr(functions, name)
        except AttributeError:
            raise TargetMissing(f"{_PREFIX}{path.name} has no {name}; is it llama.cpp? {_cure()}") from None
        function.restype, function.argtypes = result, arguments


def _check(functions: ctypes.CDLL, path: Path) -> None:
    """Refuse a build whose version or default values differ from the pinned one."""
    found = _versions(functions)
    wanted = " ".join(VERSIONS.values())
    if found != wanted:
        raise TargetMissing(f"{_PREFIX}{path.name} is llama.cpp {found}, and {wanted} is supported; {_cure()}")
    sizes = {
        structs.ModelParams: structs.MODEL_BYTES,
        structs.ContextParams: structs.CONTEXT_BYTES,
        structs.Override: structs.OVERRIDE_BYTES,
    }
    wrong = [kind.__name__ for kind, size in sizes.items() if sizeof(kind) != size]
    wrong += differing(functions.llama_model_default_params(), structs.MODEL_DEFAULTS)
    wrong += differing(functions.llama_context_default_params(), structs.CONTEXT_DEFAULTS)
    if wrong:
        raise TargetMissing(
            f"{_PREFIX}the structs of {path.name} are not those of {PACKAGE} {PINNED}: {', '.join(wrong[:3])} differ; "
            f"{_cure()}"
        )


def _cure() -> str:
    named = os.environ.get(LIBRARY_SETTING)
    return f"name a library of the supported build in {LIBRARY_SETTING}, or unset it" if named else _INSTALL


def differing(found: Structure, wanted: Mapping[str, Any]) -> list[str]:
    """Return the names of fields whose values differ from `wanted`."""
    return [name for name, value in wanted.items() if getattr(found, name) != value]


def _versions(functions: ctypes.CDLL) -> str:
    texts = []
    for name in VERSIONS:
        function = getattr(functions, name, None)
        if function is None:
            return "of an unknown version"
        function.restype, function.argtypes = c_char_p, []
        texts.append((function() or b"").decode(errors="replace"))
    return " ".join(texts)
