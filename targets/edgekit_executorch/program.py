"""The one place that calls ExecuTorch's runtime, private and experimental parts included.

A loaded program: its facts, its cache as arrays that are the cache itself, and its two methods. Knows nothing of
states, plans or sequences.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekit.errors import DamagedArtifact, InvalidInput, Unsupported, clip, vendor_errors
from edgekit_executorch.hushed import hushed, hushed_to_the_bottom
from edgekit_executorch.inspection import Contents, read_contents
from edgekit_executorch.layout import EXIT, FORWARD, LAYOUT_VERSION, STEP, cache_names, exit_after
from edgekit_executorch.operators import register_for_running
from edgekit_executorch.versions import require_runtime, versions

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from edgekit.interfaces import Logits

_BACKENDS = {"XnnpackBackend": "xnnpack", "CoreMLBackend": "coreml", "VulkanBackend": "vulkan"}
# Resizing the pool under a loaded program kills the process, so it is sized once, before the first.
_pool: list[int] = []


class LoadedProgram:
    """A program in memory, with a cache of its own."""

    def __init__(self, path: Path, threads: int, *, profile: bool = False) -> None:
        require_runtime()
        self.contents: Contents = read_contents(path)
        self.path = path
        with vendor_errors("executorch"), hushed():
            runtime = runtime_with(threads)
            _check_backends(self.contents, runtime)
            _check_operators(self.contents)
            self._program: Any = _load(runtime, path, profile)
        self._methods: dict[str, Any] = {}
        self._facts: dict[str, int | list[int]] = {}
        found = self.fact("edgekit_layout") if "edgekit_layout" in self.contents.methods else None
        if found != LAYOUT_VERSION:
            raise Unsupported(
                f"{path}: a program of layout {clip(found)}, this edgekit runs {LAYOUT_VERSION}; export it again"
            )
        self.layers = int(self.number("get_n_layers"))
        self.rows = self.number("edgekit_rows")
        self.slots = self.number("get_max_context_len")
        self.chunk = self.number("get_max_seq_len")
        self.vocabulary = self.number("get_vocab_size")
        # Programs of the time when all held floats do not say it.
        self.kv_bits = self.number("edgekit_kv_bits") if "edgekit_kv_bits" in self.contents.methods else 32

    @property
    def exits(self) -> tuple[int, ...]:
        """The layers after which `forward` can leave."""
        found = (name.removeprefix(EXIT) for name in self.contents.methods if name.startswith(EXIT))
        return tuple(sorted(int(layer) for layer in found if layer.isdecimal()))

    def fact(self, name: str) -> int | list[int]:
        """What the program says of itself; see `layout.description`."""
        if name not in self._facts:
            if name not in self.contents.methods:
                raise DamagedArtifact(f"{self.path}: states no {name}, so it is no program of edgekit; export it again")
            with vendor_errors("executorch"), hushed():
                found = self._method(name).execute([])
            self._facts[name] = int(found[0]) if len(found) == 1 else [int(item) for item in found]
        return self._facts[name]

    def number(self, name: str) -> int:
        found = self.fact(name)
        if not isinstance(found, int):
            raise DamagedArtifact(f"{self.path}: {name} is {clip(found)}, a number is needed; export it again")
        return found

    def cache(self, method: str = FORWARD) -> list[NDArray[Any]]:
        """Each layer's keys and values [head, slot, dim]: the cache itself, so that writing to it is heard.

        Narrow ones are followed by their scales and by what stands for zero, both [head, slot, 1].
        """
        with vendor_errors("executorch"), hushed():
            private = self._method(method)._method
            return [
                private.get_attribute(f"decoder.layers.{index}.attention.{kind}").numpy()[0].swapaxes(0, 1)
                for index in range(self.layers)
                for kind in cache_names(self.kv_bits)
            ]

    def forward(self, tokens: Sequence[int], start: int, rows: Sequence[int], leave: int | None = None) -> Logits:
        """Append `tokens` at `start`; logits [rows, vocabulary] of those of them that are asked for.

        With `leave` only so many layers run, and only they hold the tokens then.
        """
        method = FORWARD if leave is None else exit_after(leave)
        return self._run(method, _ids([tokens]), _ids([start]), _ids(rows))

    def step(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], rows: Sequence[int],
        *masks: NDArray[np.float32],
    ) -> Logits:  # fmt: skip
        """The same with position, place and mask chosen for each token."""
        import torch

        seen = [torch.from_numpy(np.ascontiguousarray(mask, np.float32)) for mask in masks]
        return self._run(STEP, _ids([tokens]), _ids(positions), _ids(slots), _ids(rows), *seen)

    def write_profile(self, path: Path) -> None:
        """What was timed since loading, where it was loaded with `profile`."""
        with vendor_errors("executorch"), hushed():
            self._program._program.write_etdump_result_to_file(str(path))

    def close(self) -> None:
        self._methods.clear()
        self._program = None
        gc.collect()

    def _method(self, name: str) -> Any:
        if self._program is None:
            raise InvalidInput(f"{self.path}: the program is closed")
        if name not in self._methods:
            self._methods[name] = self._program.load_method(name)
        return self._methods[name]

    def _run(self, name: str, *inputs: Any) -> Logits:
        with vendor_errors("executorch"):
            found: Logits = self._method(name).execute(inputs)[0].numpy()
            return found


class BareMethod:
    """The method `forward` of a program that is no artifact: one tensor in, one out."""

    def __init__(self, data: bytes) -> None:
        with vendor_errors("executorch"), hushed_to_the_bottom():
            # A method does not keep its program alive.
            self._program: Any = runtime_with(pool_threads() or 1).load_program(data)
            self._method: Any = self._program.load_method(FORWARD)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        with vendor_errors("executorch"):
            found: torch.Tensor = self._method.execute([values])[0].clone()
            return found


def _ids(values: Any) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.long)


def runtime_with(threads: int) -> Any:
    """ExecuTorch's runtime; the number of threads is that of the first who asked."""
    register_for_running()
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    if not _pool:
        with hushed_to_the_bottom():
            portable_lib._unsafe_reset_threadpool(threads)
        _pool.append(threads)
    return Runtime.get()


def pool_threads() -> int | None:
    """How many threads this process computes with; None before the first program."""
    return _pool[0] if _pool else None


def _load(runtime: Any, path: Path, profile: bool) -> Any:
    try:
        with hushed_to_the_bottom():
            return runtime.load_program(path, enable_etdump=profile, debug_buffer_size=0)
    except RuntimeError as error:
        raise DamagedArtifact(
            f"{path}: ExecuTorch does not load it ({clip(str(error))}); export or copy it again"
        ) from error


def _check_backends(contents: Contents, runtime: Any) -> None:
    available = runtime.backend_registry.registered_backend_names
    for name in contents.delegates:
        if name not in available:
            known = ", ".join(_BACKENDS.get(each, each) for each in available)
            raise Unsupported(
                f"the program was lowered to {_BACKENDS.get(name, name)}, which this build of ExecuTorch cannot run "
                f"(it has {known}); run it on its device, or export for xnnpack"
            )


def _check_operators(contents: Contents) -> None:
    from executorch.extension.pybindings import portable_lib

    unknown = contents.operators - set(portable_lib._get_operator_names())
    if unknown:
        raise Unsupported(
            f"the program calls {clip(min(unknown))}, which ExecuTorch {versions().get('executorch')} does not have; "
            "export it again here, or install the version that its manifest.json names under tools"
        )
