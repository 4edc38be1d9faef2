"""Layers on a GPU run where the library knows one. The wheel's library knows none on Linux, and says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from edgekit_llamacpp import LlamaCppTarget, devices, library

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.doctor import Practice, examine
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported

pytestmark = pytest.mark.llamacpp
runs = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the wheel for macOS has Metal")


class ThreeDevices:
    """The functions of a library that knows a processor and two GPUs."""

    version = "a build with GPUs"
    described = ((0, b"CPU", b"a processor"), (1, b"Vulkan0", b"a card"), (2, b"CUDA0", b"an integrated GPU"))

    def llama_supports_gpu_offload(self) -> bool:
        return True

    def ggml_backend_dev_count(self) -> int:
        return len(self.described)

    def ggml_backend_dev_get(self, index: int) -> int:
        return 100 + index

    def ggml_backend_dev_memory(self, pointer: int, free: Any, total: Any) -> None:
        free._obj.value, total._obj.value = 3 << 30, 4 << 30

    def __getattr__(self, name: str) -> Any:
        field = {"ggml_backend_dev_type": 0, "ggml_backend_dev_name": 1, "ggml_backend_dev_description": 2}[name]
        return lambda pointer: self.described[pointer - 100][field]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, planned for a graphics card."""
    out = tmp_path_factory.mktemp("gpu") / "demo"
    edgekit.export("demo", out, "rtx-4060", target="llamacpp", context=256, effort="quick")
    return out


@pytest.mark.parametrize(
    ("backend", "name", "where"),
    [("cuda", "CUDA0", "shared"), ("vulkan", "Vulkan0", "own"), ("metal", "Vulkan0", "own")],
)
def test_the_planned_kind_of_gpu_is_taken_first(backend: str, name: str, where: str) -> None:
    plan = edgekit.plan("demo", "rtx-4060", target="llamacpp")
    plan = plan.model_copy(update={"backend": backend})
    here, gpu, note = devices.on_this_machine(ThreeDevices(), plan)  # type: ignore[arg-type]
    assert gpu is not None and gpu.name == name and here.gpu_layers == plan.gpu_layers
    assert here.memory.gpu_memory == where
    assert note.startswith(f"7 layers run on {name} (") and note.endswith("never run by us")


def test_every_device_is_described() -> None:
    assert devices.described(ThreeDevices()) == [  # type: ignore[arg-type]
        "CPU (a processor; CPU)",
        "Vulkan0 (a card; GPU, 3 GiB of 4 GiB free)",
        "CUDA0 (an integrated GPU; GPU in host memory, 3 GiB of 4 GiB free)",
        devices.NEVER_RUN,
    ]


@runs
@on_linux
def test_the_wheel_knows_no_gpu_and_doctor_says_so() -> None:
    assert LlamaCppTarget().devices()[-1] == "no GPU"
    practice = Practice(extras=list, targets=lambda: ["llamacpp"], installed=lambda name: None)
    (finding,) = [each for each in examine(practice).findings if each.subject == "target llamacpp"]
    assert "its library sees CPU (" in finding.found and finding.found.endswith("no GPU")


@runs
@on_linux
def test_an_artifact_for_a_gpu_runs_on_the_processor_and_says_so(artifact: Path) -> None:
    with edgekit.open(artifact) as runtime:
        assert runtime.notes[0].startswith("7 layers were planned on a GPU, and xllamacpp ")
        assert runtime.memory().predicted.gpu_bytes == 0 < runtime.memory().predicted.kv_bytes
        text = runtime.generate("def add(a, b):", max_tokens=8, ignore_eos=True).text
    with edgekit.open(artifact, gpu_layers=0) as runtime:
        assert not runtime.notes and runtime.generate("def add(a, b):", max_tokens=8, ignore_eos=True).text == text


@runs
@on_linux
def test_the_memory_that_the_processor_needs_is_what_must_fit(artifact: Path) -> None:
    with edgekit.open(artifact, prefixes=0) as runtime:
        taken = runtime.memory().predicted.private_bytes
    assert open_artifact(artifact).plan.estimate.private_bytes < taken
    edgekit.open(artifact, memory=taken, on_pressure="refuse", prefixes=0).close()
    with pytest.raises(DoesNotFit):
        edgekit.open(artifact, memory=taken - 1, on_pressure="refuse", prefixes=0)


@runs
@on_linux
@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [(1, Unsupported, "knows no GPU"), (8, InvalidInput, "must be 0 to 7"), (-1, InvalidInput, "must be at least 0")],
)
def test_layers_that_cannot_run_are_refused(artifact: Path, layers: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        edgekit.open(artifact, gpu_layers=layers)


@pytest.mark.parametrize("layers", [0, 3])
def test_an_artifact_whose_layers_cannot_be_divided_refuses_a_number(layers: int) -> None:
    with pytest.raises(Unsupported, match="onnx does not divide layers"):
        edgekit.open(Path(edgekit.__file__).parent / "_demo/artifact", gpu_layers=layers)
