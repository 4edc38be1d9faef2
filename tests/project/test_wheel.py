"""The wheel, in a fresh environment and an empty directory, lists its targets and profiles and plans."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return next(out.glob("*.whl"))


def with_the_index(*command: str | Path, **options: Any) -> str:
    """Run a command that fetches packages; skip the test where there is no index. Returns its output."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    said = done.stdout[-2000:] + done.stderr[-2000:]
    if done.returncode and re.search(r"No matching distribution|NewConnectionError|Temporary failure", said):
        pytest.skip(f"needs a package index: {said.strip().splitlines()[-1]}")
    assert done.returncode == 0, said
    return done.stdout


def test_a_wheel_made_from_the_source_distribution_is_the_wheel_made_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    with_the_index(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT)  # sdist, then the wheel from it
    made = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(made) as ours, zipfile.ZipFile(wheel) as theirs:
        assert ours.namelist() == theirs.namelist()
        assert [name for name in ours.namelist() if ours.read(name) != theirs.read(name)] == []


@pytest.mark.long
def test_the_wheel_in_an_empty_environment_answers_and_plans(wheel: Path, tmp_path: Path) -> None:
    """`pip install 'edgekit[onnx]'` suffices for both: the extras of apps are not installed."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    with_the_index(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", f"{wheel}[onnx]")
    listed = run(python, tmp_path, "-m", "pip", "--disable-pip-version-check", "list", "--format=json")
    names = {each["name"].lower() for each in json.loads(listed)}
    assert {"onnxruntime", "onnx", "tokenizers"} <= names
    assert not names & {"torch", "transformers", "starlette", "uvicorn", "jsonschema", "pytest"}
    home = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    answer = run(python, tmp_path, "-m", "edgekit", "run", "demo", "def add(a, b):", "--max-tokens", "8", env=home)
    assert answer.startswith("def add(a, b):") and len(answer) > len("def add(a, b):\n")
    board = ("-m", "edgekit", "plan", "demo", "--device", "raspberry-pi-5-8gb")
    assert run(python, tmp_path, *board, env=home).startswith("raspberry-pi-5-8gb: fits, demo as onnx cpu balanced")


def run(python: Path, cwd: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(python), *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_what_it_needs_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops >= {"edgekit", "edgekit_onnx", "edgekit_mlx", "edgekit_llamacpp", "edgekit_executorch"}
    assert not tops & {"tests", "targets", "profiles", "examples", "docs"}
    assert sum(name.startswith("edgekit/_profiles/") and name.endswith(".yaml") for name in names) >= 30
    for package in ("edgekit", "edgekit_onnx", "edgekit_mlx", "edgekit_llamacpp", "edgekit_executorch"):
        assert f"{package}/py.typed" in names
    assert "edgekit/_demo/model/edgekit.json" in names and "edgekit/_demo/artifact/weights.bin" not in names
    assert not [name for name in names if name.endswith("/model.safetensors")], "float weights lie in a clone alone"
    assert wheel.stat().st_size < 10_000_000
    assert {f"edgekit/apps/serve/page/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    for name in ("build.py", "CMakeLists.txt", "edgekit_native.h", "src/api.cpp", "src/unicode_table.cpp"):
        assert f"edgekit/apps/native/{name}" in names
    # One file in optimum's namespace package, which must never get an __init__.py from us.
    assert [name for name in names if name.startswith("optimum/")] == ["optimum/commands/register/register_edgekit.py"]


def test_the_wheel_alone_lists_targets_and_profiles_and_plans(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import edgekit, edgekit.plugins as plugins; print(edgekit.__file__, *plugins.target_names())"
    file, *targets = run(Path(sys.executable), tmp_path, "-c", code, env=env).split()
    assert file.startswith(str(tmp_path)) and targets == ["executorch", "llamacpp", "mlx", "onnx"]
    edgekit = (Path(sys.executable), tmp_path, "-m", "edgekit")
    assert len(json.loads(run(*edgekit, "devices", "--json", env=env))) >= 30
    assert json.loads(run(*edgekit, "plan", "demo", "--device", "pixel-9", "--json", env=env))[0]["device"] == "pixel-9"


def package_page(address: str) -> dict[str, Any]:
    """Return the metadata that the package index shows of a release from the repository at `address`."""
    command = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PROJECT_URL": address}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page: dict[str, Any] = json.loads(done.stdout)
    return page


def test_a_release_names_its_pages_and_its_readme_leads_to_them() -> None:
    page = package_page("https://example.org/makers/edgekit/")
    tag = f"v{page['version']}"
    links = re.findall(r"\]\(([^)]*)\)", page["readme"]["text"])
    assert len(links) > 20
    assert f"https://example.org/makers/edgekit/raw/{tag}/docs/run_and_plan.svg" in links
    files = [*links, *(page["urls"][name] for name in ("Documentation", "Changelog", "Security"))]
    elsewhere = set(re.findall(r"\]\((https://[^)]*)\)", (ROOT / "README.md").read_text()))
    for link in files:
        if link in elsewhere:
            continue
        found = re.fullmatch(rf"https://example\.org/makers/edgekit/(?:blob|raw)/{re.escape(tag)}/(.+)", link)
        assert found, link
        assert (ROOT / found[1]).exists(), link


def test_without_an_address_the_package_names_none() -> None:
    page = package_page("")
    assert not page.get("urls")
    assert page["readme"]["text"] == (ROOT / "README.md").read_text()


@pytest.mark.skipif(shutil.which("c++") is None or sys.platform != "linux", reason="needs a C++ compiler on Linux")
def test_a_wheel_with_compiled_operators_is_for_their_machine(wheel: Path, tmp_path: Path) -> None:
    library = tmp_path / "operators.so"
    subprocess.run(
        ["c++", "-shared", "-x", "c++", "-", "-o", library],
        input=b"#include <cstdlib>\nint number() { return rand(); }",
        check=True,
    )
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    environment = {**os.environ, "EDGEKIT_WHEEL_KERNELS": str(library)}
    subprocess.run(build, check=True, capture_output=True, env=environment)
    (made,) = tmp_path.glob("*.whl")
    assert re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", made.name) and wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as ours, zipfile.ZipFile(wheel) as theirs:
        place = "edgekit_onnx/kernels/build/libedgekit_kernels.so"
        assert ours.read(place) == library.read_bytes() and place not in theirs.namelist()
