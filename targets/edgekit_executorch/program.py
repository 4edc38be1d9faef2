"""A loaded program: its facts, its cache and its methods. Only this module calls ExecuTorch's runtime.

Some of the calls are private or experimental in ExecuTorch.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekit.errors import DamagedArtifact, InvalidInput, Unsupported, quote_short, vendor_errors
from edgekit_executorch.inspection import Contents, read_contents
from edgekit_executorch.layout import APPEND, EXIT, LAYOUT_VERSION, STEP, cache_names, exit_after
from edgekit_executorch.operators import register_for_running
from edgekit_executorch.quiet import quiet_output, quiet_stderr
from edgekit_executorch.versions import require, versions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.contracts.engine import Logits

_BACKENDS = {"XnnpackBackend": "xnnpack", "CoreMLBackend": "coreml", "VulkanBackend": "vulkan"}
# Resizing the thread pool under a loaded program kills the process, so it is sized once, before the first program.
_pool: list[int] = []


class LoadedProgram:
    """A program in memory, with its cache."""

    def __init__(self, path: Path, threads: int) -> None:
        require()
        self.contents: Contents = read_contents(path)
        self.path = path
        with vendor_errors("executorch"), quiet_output():
            runtime = runtime_with(threads)
            _check_backends(self.contents, runtime)
            _check_operators(self.contents)
            self._program: Any = _load(runtime, path)
        self._methods: dict[str, Any] = {}
        self._facts: dict[str, int | list[int]] = {}
        layout = self.fact("edgekit_layout") if "edgekit_layout" in self.contents.methods else None
        if layout != LAYOUT_VERSION:
            raise Unsupported(
                f"{path}: a program of layout {quote_short(layout)}, this edgekit runs {LAYOUT_VERSION}; "
                "export it again"
            )
        self.layers = int(self.number("get_n_layers"))
        self.rows = self.number("edgekit_rows")
        self.slots = self.number("get_max_context_len")
        self.chunk = self.number("get_max_seq_len")
        self.vocabulary = self.number("get_vocab_size")
        self.kv_bits = self.number("edgekit_kv_bits")

    @property
    def exits(self) -> tuple[int, ...]:
        """The layers after which the program has an early exit."""
        layers = (name.removeprefix(EXIT) for name in self.contents.methods if name.startswith(EXIT))
        return tuple(sorted(int(layer) for layer in layers if layer.isdecimal()))

    def fact(self, name: str) -> int | list[int]:
        """Return a fact that the program states; see `layout.description`."""
        if name not in self._facts:
            if name not in self.contents.methods:
                raise DamagedArtifact(f"{self.path}: states no {name}, so edgekit did not export it; export it again")
            with vendor_errors("executorch"), quiet_output():
                values = self._method(name).execute([])
            self._facts[name] = int(values[0]) if len(values) == 1 else [int(value) for value in values]
        return self._facts[name]

    def number(self, name: str) -> int:
        """Return a fact that is one number."""
        value = self.fact(name)
        if not isinstance(value, int):
            raise DamagedArtifact(f"{self.path}: {name} is {quote_short(value)}, a number is needed; export it again")
        return value

    def cache(self) -> list[NDArray[Any]]:
        """Return views [head, slot, dim] of each layer's keys and values. Writing to them changes the cache.

        8-bit keys are followed by their scales and zero points, both [head, slot, 1]; values likewise.
        """
        with vendor_errors("executorch"), quiet_output():
            private = self._method(APPEND)._method
            return [
                private.get_attribute(f"decoder.layers.{index}.attention.{kind}").numpy()[0].swapaxes(0, 1)
                for index in range(self.layers)
                for kind in cache_names(self.kv_bits)
            ]

    @property
    def features(self) -> tuple[int, ...]:
        """The layers whose hidden states `append` returns."""
        found = self.fact("edgekit_features") if "edgekit_features" in self.contents.methods else []
        return (found,) if isinstance(found, int) else tuple(found)

    def append(
        self, tokens: Sequence[int], start: int, rows: Sequence[int], exit_layer: int | None = None
    ) -> list[Any]:
        """Append `tokens` at slot `start`; return logits [rows, vocabulary] of the tokens with the indices `rows`.

        With `exit_layer`, only the layers before that exit run and cache the tokens; without, the hidden states
        [tokens, width] after each of `features` follow.
        """
        method = APPEND if exit_layer is None else exit_after(exit_layer)
        return self._run(method, _ids([tokens]), _ids([start]), _ids(rows))

    def step(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], rows: Sequence[int],
        *masks: NDArray[np.float32],
    ) -> Logits:  # fmt: skip
        """Like `append`, with position, slot and mask chosen for each token."""
        import torch

        tensors = [torch.from_numpy(np.ascontiguousarray(mask, np.float32)) for mask in masks]
        logits: Logits = self._run(STEP, _ids([tokens]), _ids(positions), _ids(slots), _ids(rows), *tensors)[0]
        return logits

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

    def _run(self, name: str, *inputs: Any) -> list[Any]:
        with vendor_errors("executorch"):
            return [output.numpy() for output in self._method(name).execute(inputs)]


def _ids(values: Any) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.long)


def runtime_with(threads: int) -> Any:
    """Return ExecuTorch's runtime. The first call in a process fixes the number of threads."""
    register_for_running()
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    if not _pool:
        with quiet_stderr():
            portable_lib._unsafe_reset_threadpool(threads)
        _pool.append(threads)
    return Runtime.get()


def pool_threads() -> int | None:
    """Return the number of threads of this process; None before the first program."""
    return _pool[0] if _pool else None


def _load(runtime: Any, path: Path) -> Any:
    try:
        with quiet_stderr():
            return runtime.load_program(path)
    except RuntimeError as error:
        raise DamagedArtifact(
            f"{path}: ExecuTorch does not load it ({quote_short(str(error))}); export or copy it again"
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
            f"the program calls {quote_short(min(unknown))}, which ExecuTorch {versions().get('executorch')} does "
            f"not have; "
            "export it again here, or install the version that its manifest.json names under tools"
        )
