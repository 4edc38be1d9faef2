"""The native library, compiled here, and the demo model that Python opens too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from exported_demo import export_demo

import edgekit
from edgekit.apps.native.build import build, missing
from edgekit.apps.native.library import NativeLibrary, NativeModel
from edgekit.errors import Unsupported

NARROW_BITS = (16, 8)


@pytest.fixture(scope="package", autouse=True)
def own_operators() -> Iterator[None]:
    """Let Python compute with onnxruntime's own operators, as the library does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_KERNELS", "off")
        yield


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    reason = missing()
    if reason:
        pytest.skip(reason)
    return NativeLibrary(build(sanitize="NATIVE_SANITIZE" in os.environ))


@pytest.fixture(scope="session")
def demo_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "NATIVE_DEMO" in os.environ:  # a process with sanitizers does not load torch
        return Path(os.environ["NATIVE_DEMO"])
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    return export_demo(tmp_path_factory.mktemp("native") / "demo.edgekit")


@pytest.fixture(scope="session")
def narrow_artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The demo for caches of 16 and 8 bits."""
    if "NATIVE_DEMO" in os.environ:
        return {bits: Path(os.environ[f"NATIVE_DEMO_{bits}"]) for bits in NARROW_BITS}
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("narrow")
    return {bits: export_demo(folder / f"{bits}.edgekit", kv_bits=bits) for bits in NARROW_BITS}


@pytest.fixture(scope="session")
def of_bits(demo_artifact: Path, narrow_artifacts: dict[int, Path]) -> dict[int, Path]:
    """The demo by the bits of its cache."""
    return {32: demo_artifact, **narrow_artifacts}


@pytest.fixture(scope="session")
def model(library: NativeLibrary, demo_artifact: Path) -> Iterator[NativeModel]:
    opened = library.open(demo_artifact)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def open_exact() -> Callable[[Path], edgekit.Runtime]:
    """Opens an artifact in exact mode, with drafts and prefixes; skips where the processor has none."""

    def opened(artifact: Path) -> edgekit.Runtime:
        try:
            return edgekit.open(artifact, exact=True, draft="ngram", prefixes="16MiB")
        except Unsupported as error:
            pytest.skip(str(error))

    return opened


@pytest.fixture(scope="package")
def runtime(demo_artifact: Path, own_operators: None) -> Iterator[edgekit.Runtime]:
    """Without a prefix cache, so that a prompt is computed in the same pieces each time."""
    with edgekit.open(demo_artifact, draft="off", prefixes=0) as opened:
        yield opened
