"""Opens artifacts with the library that is installed, and gives its answers piece by piece."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from logging import INFO, WARNING
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from edgekit.apps.native.build import executorch_folder, find_built
from edgekit.apps.native.library import NativeLibrary, NativeModel
from edgekit.common.files import file_sha256
from edgekit.common.log import log
from edgekit.common.packages import TARGET_PACKAGES, versions_of
from edgekit.common.packed_weights import PACKING_SHARE, PackedFolder, packed_limit, packed_weights, time_limit_s
from edgekit.contracts.drafter import LOOKUP_TOKENS
from edgekit.contracts.manifest import MANIFEST
from edgekit.contracts.native_loop import NativeAnswer, NativeMemory
from edgekit.errors import EdgekitError, TargetFailed, TargetMissing

PACKAGE = "edgekit_native_library"  # in the wheel edgekit-native
_EXECUTORCH = "executorch"  # the target
_PACKED = "weights"  # in its folder of the cache
_WEIGHTS, _PACKED_SHARE = "weights.bin", 3  # of an artifact, and bytes of packed weights by its bytes, at most
_ATTENTION = "extension/llm/custom_ops/libcustom_ops_aot_lib.so"  # in ExecuTorch's wheel


def find_library(target: str = "onnx") -> Path:
    """Return the library that was compiled here from these sources, else the wheel's."""
    compiled = find_built(executorch=executorch_folder() if target == _EXECUTORCH else None)
    if compiled is not None:
        return compiled
    if target == _EXECUTORCH:
        raise TargetMissing(
            "the native library with ExecuTorch is not compiled yet; compile it: python -m edgekit.apps.native.build"
            " --executorch"
        )
    found = find_spec(PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("libedgekit_native.*")):
            return path
    raise TargetMissing(
        "the native library is not installed; pip install edgekit-native, or compile it: "
        "python -m edgekit.apps.native.build"
    )


class NativeStream:
    """An answer that a thread generates, so that the one that reads it can be interrupted."""

    def __init__(self, model: NativeModel, tokens: Sequence[int], options: Mapping[str, Any]) -> None:
        self._model, self._pieces = model, SimpleQueue[str | None]()
        self._outcome: NativeAnswer | Exception | None = None
        self._is_cancelled = False
        self._thread = Thread(target=self._generate, args=(tokens, options), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[str]:
        while (text := self._pieces.get()) is not None:
            yield text

    def answer(self) -> NativeAnswer:
        """Wait for the end and return the whole answer, or raise why there is none."""
        self._thread.join()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def cancel_soon(self) -> None:
        """End the answer after the token that is being computed; for signal handlers."""
        self._is_cancelled = True
        self._model.cancel()

    def close(self) -> None:
        self.cancel_soon()
        self._thread.join()

    def _generate(self, tokens: Sequence[int], options: Mapping[str, Any]) -> None:
        try:
            self._outcome = self._model.generate(tokens, on_text=self._put, **options)
        except Exception as error:
            self._outcome = error
        finally:
            self._pieces.put(None)

    def _put(self, text: str) -> None:
        self._pieces.put(text)
        if self._is_cancelled:  # the library forgets what is cancelled before it begins
            self._model.cancel()


class NativeLoop:
    """An artifact that is opened for one answer after the other."""

    def __init__(self, artifact: Path, target: str, *, exact: bool = False, drafts: bool = False) -> None:
        library, is_program = find_library(target), target == _EXECUTORCH
        packed = PackedFolder(None) if is_program else _packed_weights(artifact, library)
        if packed.note:
            log.log(WARNING if packed_limit() else INFO, packed.note)
        self._hold = packed.hold
        self.maps_weights = is_program or packed.folder is not None
        self._model = NativeLibrary(library).open(
            artifact,
            runtime=_attention() if is_program else None,
            exact=exact,
            packed=packed.folder and packed.folder / _PACKED,
        )
        self._draft_tokens = LOOKUP_TOKENS if drafts else 0

    def stream(self, prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> NativeStream:
        """Answer a text, or messages that the chat template renders. Takes the options of `NativeModel.generate`."""
        tokenizer, is_chat = self._model.tokenizer, not isinstance(prompt, str)
        if isinstance(prompt, str):
            tokens = tokenizer.encode(prompt, add_special_tokens=True)
        else:
            tokens = tokenizer.encode(self._model.template.render(prompt))
        options |= {"begins_text": is_chat, "draft_tokens": self._draft_tokens}
        return NativeStream(self._model, tokens, options)

    def memory(self) -> NativeMemory:
        return self._model.memory()

    def close(self) -> None:
        self._model.close()
        if self._hold is not None:
            self._hold.close()


def _packed_weights(artifact: Path, library: Path) -> PackedFolder:
    """Return the weights as another process packs them with the library; `edgekit.open` keeps its own."""

    def save(folder: Path) -> None:
        arguments = [str(each) for each in (library, artifact.resolve(), folder / _PACKED)]
        command = [sys.executable, "-P", "-m", __name__, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=time_limit_s(weights))
        except subprocess.TimeoutExpired as late:
            raise TargetFailed(f"packing was ended after {late.timeout:,.0f} s") from late
        if done.returncode != 0:
            raise TargetFailed(done.stderr.decode(errors="replace")[-300:].strip() or f"exit {done.returncode}")
        (folder / "model.txt").write_text(f"{artifact.name} for the native library")

    weights = (artifact / _WEIGHTS).stat().st_size
    hashes = [file_sha256(each) for each in (artifact / MANIFEST, library)]
    return packed_weights(
        f"{hashes} {versions_of(TARGET_PACKAGES['onnx'])}", weights, _PACKED_SHARE, PACKING_SHARE, save
    )


def _attention() -> Path | str:
    """ExecuTorch's attention operators, so that texts equal Python's; an empty text if its wheel has none."""
    library = executorch_folder() / _ATTENTION
    return library if library.is_file() else ""


def _main() -> None:
    library, artifact, packed = (Path(each) for each in sys.argv[1:])
    try:
        NativeLibrary(library).pack(artifact, packed)
    except EdgekitError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
