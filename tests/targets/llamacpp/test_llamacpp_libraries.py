"""Which library is opened: one of the supported build; others are refused by name before anything of them is called."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from ctypes import Structure, sizeof
from pathlib import Path
from shutil import which

import pytest
from edgekit_llamacpp import library, structs, trial

from edgekit.doctor.probes import try_out
from edgekit.errors import TargetFailed, TargetMissing

pytestmark = pytest.mark.llamacpp
runs = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
DEFAULTS: dict[type[Structure], bytes] = {
    structs.ModelParams: bytes(structs.ModelParams(**structs.MODEL_DEFAULTS)),
    structs.ContextParams: bytes(structs.ContextParams(**structs.CONTEXT_DEFAULTS)),
}
compiles = pytest.mark.skipif(which("cc") is None, reason="needs a C compiler")
LOAD = "from edgekit_llamacpp import library; print(library.load().version)"
OPEN = LOAD.replace("load()", "opened()")  # without a trial


def loaded(script: str = LOAD, **settings: str) -> str:
    """The last line that a separate process prints, its error included."""
    return printed(script, **settings)[-1]


def printed(script: str, **settings: str) -> list[str]:
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path, **settings},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return (done.stdout + done.stderr).strip().splitlines()


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A library with the names of llama.cpp's functions, which returns zeros, and versions that the tests write."""
    return written(tmp_path, {kind: bytes(sizeof(kind)) for kind in (structs.ModelParams, structs.ContextParams)}, {})


def written(folder: Path, defaults: dict[type[Structure], bytes], bodies: dict[str, str]) -> Path:
    """The source of a library with llama.cpp's functions: some return these defaults, others have these bodies."""
    lines = ["#include <signal.h>", "#include <stdio.h>", "static long loaded = 0;"]
    for name, (result, _) in library._FUNCTIONS.items():
        if result in defaults:
            values = ",".join(map(str, defaults[result]))
            lines.append(f"struct {name} {{ unsigned char bytes[{len(defaults[result])}]; }};")
            lines.append(f"struct {name} {name}(void) {{ struct {name} its = {{{{{values}}}}}; return its; }}")
        else:
            lines.append(f"long {name}(const char *text) {{ {bodies.get(name, 'return 0;')} }}")
    lines += [f"const char * {name}(void) {{ return {name.upper()}; }}" for name in library.VERSIONS]
    source = folder / "stub.c"
    source.write_text("\n".join(lines))
    return source


def compiled(source: Path, versions: dict[str, str]) -> Path:
    made = source.with_suffix(".so")
    defined = [f'-D{name.upper()}="{version}"' for name, version in versions.items()]
    subprocess.run(["cc", "-shared", "-fPIC", "-w", *defined, "-o", made, source], check=True, capture_output=True)
    return made


@compiles
def test_a_library_of_another_version_is_refused_by_name(stub: Path) -> None:
    other = compiled(stub, {"llama_version": "0.5.0", "ggml_version": "0.25.1"})
    found = loaded(EDGEKIT_LLAMA_LIB=str(other))
    assert "stub.so is llama.cpp 0.5.0 0.25.1, and 0.6.0-dev 0.26.0 is supported" in found
    assert "or unset it" in found and "pip install" not in found


@compiles
def test_a_library_with_other_structs_is_refused_by_name(stub: Path) -> None:
    found = loaded(EDGEKIT_LLAMA_LIB=str(compiled(stub, library.VERSIONS)))
    assert "the structs of stub.so are not those of xllamacpp 2026.10.11549: n_gpu_layers, split_mode" in found


@compiles
@pytest.mark.parametrize("found", [True, False])
def test_kernels_in_files_of_their_own_are_those_beside_the_library(found: bool, tmp_path: Path) -> None:
    bodies = {
        "ggml_backend_load_all_from_path": f'loaded = {int(found)}; fprintf(stderr, "loads %s\\n", text); return 0;',
        "ggml_backend_dev_by_type": "return loaded;",
    }
    made, link = compiled(written(tmp_path, DEFAULTS, bodies), library.VERSIONS), tmp_path / "other" / "llama.so"
    link.parent.mkdir()
    link.symlink_to(made)
    lines = printed(OPEN, EDGEKIT_LLAMA_LIB=str(link))
    assert f"loads {tmp_path}" in lines
    if found:
        assert any(line.startswith("EDGEKIT_LLAMA_LIB 0.6.0-dev 0.26.0 ") for line in lines)
    else:
        assert "llama.so has no kernels for this processor, and none lie next to it; name a library" in lines[-1]


@compiles
def test_a_library_that_would_end_the_process_is_refused(tmp_path: Path) -> None:
    bodies = {"ggml_backend_dev_by_type": "return 1;", "llama_model_load_from_file": "raise(SIGILL); return 0;"}
    made = compiled(written(tmp_path, DEFAULTS, bodies), library.VERSIONS)
    found = loaded(EDGEKIT_LLAMA_LIB=str(made), EDGEKIT_HOME=str(tmp_path / "home"))
    assert "stub.so ended a trial process by signal 4: it was compiled for another processor, or wrongly" in found


@runs
def test_a_trial_notices_wrong_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    trial.check(library.load())
    monkeypatch.setattr(trial, "_MOST_APART", 1e-9)  # flash attention is apart by more
    with pytest.raises(TargetFailed, match=r"computes wrongly: its logits differ by 0\.0"):
        trial.check(library.load())


@runs
def test_a_library_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged, place = library._library_of_package(), tmp_path / "libllama.so"
    assert packaged is not None
    place.symlink_to(packaged)
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    library._try_out(place)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    library._try_out(place)
    monkeypatch.setenv("GGML_BACKEND_PATH", __import__("_ctypes").__file__ or "")
    library._hash_of.cache_clear()  # other kernels are another build
    with pytest.raises(TargetMissing, match=r"libllama\.so could not be tried"):
        library._try_out(place)
    library._hash_of.cache_clear()


def test_a_library_that_is_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.so").write_bytes(b"no library")
    assert "none.so cannot be opened" in loaded(EDGEKIT_LLAMA_LIB=str(tmp_path / "none.so"))
    assert "absent.so is not a file" in loaded(EDGEKIT_LLAMA_LIB=str(tmp_path / "absent.so"))
    assert f"{tmp_path} holds no libllama.so or libllama.dylib" in loaded(EDGEKIT_LLAMA_LIB=str(tmp_path))
    python = __import__("_ctypes").__file__
    assert "has no llama_backend_init; is it llama.cpp?" in loaded(EDGEKIT_LLAMA_LIB=python)


@runs
def test_a_library_of_the_same_build_in_another_place_runs(tmp_path: Path) -> None:
    packaged = library._library_of_package()
    assert packaged is not None
    (tmp_path / "lib").mkdir()
    place = tmp_path / "lib" / "libllama.so"
    place.symlink_to(packaged)
    for named in (place, tmp_path):  # its file, or the folder of a package
        assert loaded(EDGEKIT_LLAMA_LIB=str(named), EDGEKIT_HOME=str(tmp_path)).startswith(
            "EDGEKIT_LLAMA_LIB 0.6.0-dev 0.26.0 "
        )


@runs
def test_another_llamacpp_in_the_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "xllamacpp has loaded another llama.cpp into this process" in loaded(f"import xllamacpp; {LOAD}")
    monkeypatch.setitem(sys.modules, "llama_cpp", types.ModuleType("llama_cpp"))
    library.load.cache_clear()
    with pytest.raises(TargetMissing, match="llama_cpp has loaded another"):
        library.load()
    monkeypatch.delitem(sys.modules, "llama_cpp")
    assert library.load().version


@runs
def test_differing_fields_are_named() -> None:
    params = library.load().llama_context_default_params()
    assert library.differing(params, structs.CONTEXT_DEFAULTS) == []
    params.n_seq_max = 7
    assert library.differing(params, structs.CONTEXT_DEFAULTS) == ["n_seq_max"]


def test_missing_library_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "version_of", lambda name: None)
    assert library.missing() == "xllamacpp is not installed; pip install 'edgekit[llamacpp]'"
    monkeypatch.setattr(library, "version_of", lambda name: "2026.1.1")
    assert "2026.1.1 is installed and 2026.10.11549 is supported" in str(library.missing())
    monkeypatch.setattr(library, "version_of", lambda name: library.PINNED)
    monkeypatch.setattr(library, "_library_of_package", lambda: Path("/lib.so"))
    monkeypatch.setattr(library, "_has_avx2", lambda: False)
    assert "AVX2" in str(library.missing())
    monkeypatch.setattr(library, "_has_avx2", lambda: True)
    monkeypatch.setattr(library, "_opens_libgomp", lambda: False)
    assert sys.platform != "linux" or "libgomp.so.1" in str(library.missing())
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Windows" in str(library.missing())


def test_doctor_opens_a_library_that_the_user_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.LIBRARY_SETTING, __import__("_ctypes").__file__)
    found = str(try_out(("target", "llamacpp"), 60).facts["missing"])
    assert "has no llama_backend_init" in found and "\n" not in found
