"""Runs the onnx target and the runtime as programs for arm64, under emulation, and compares logits with this machine's.

    python tests/helpers/arm64.py [--quick] [--prompts 12] [--folder build/arm64]

Needs Debian on x86-64, its package mirror and the package index (160 MB once, kept in the folder); neither root nor
anything registered with the kernel. The exit status is 0, 3 where arm64 gives a wrong result, and 75, with the reason,
where it could not be run. `--prompts` is the number of texts of the native library for each of the ways that they are
written. `--quick` takes four, in exact mode alone; it checks all of the tiny models on one processor only, and leaves
out the runtime's tests, which depend on the time that emulation takes.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from manifests import change_manifest
from packaging.requirements import Requirement

from edgekit.apps.native.wheel import make_wheel
from edgekit.common.divergence import Pair, divergence_of
from edgekit.errors import EdgekitError
from examples.small_models import RealModelMissing, smollm2

ROOT = Path(__file__).parents[2]
CPUS = {
    "cortex-a72": "Raspberry Pi 4: no dot products",
    "neoverse-n1": "as Cortex-A76 of the Raspberry Pi 5: dot products",
    "max": "every extension, i8mm and SME among them",
}
WRONG, COULD_NOT_RUN = 3, 75
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SYSTEM, EMULATOR = "bookworm", "trixie"  # the oldest Python that edgekit supports; an emulator that has arm64's cpuinfo
SYSTEM_PACKAGES = ("python3", "libpython3.11", "libstdc++6", "libgomp1", "zlib1g")
TEST_PACKAGES = ("hypothesis", "psutil", "pytest", "pytest-xdist")
WHEELS = (
    "--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--abi=cp311", "--abi=abi3", "--abi=none",
    "--platform=manylinux2014_aarch64",
    *(f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 24, 26, 27, 28, 31, 34)),
)  # fmt: skip
TESTS = tuple(
    f"tests/{name}.py"
    for name in (
        "targets/test_conformance_of_engines",
        "runtime/test_loop",
        "runtime/test_chat_templates",
    )
)
# They bound the memory of a child process, to which the emulator adds its own.
LEFT_OUT = tuple(
    f"tests/runtime/test_chat_templates.py::test_{name}"
    for name in (
        "the_worker_stays_warm_and_is_replaced_when_it_dies",
        "a_large_chat_is_counted_while_it_is_rendered_and_leaves_nothing",
        "a_template_gets_memory_by_the_size_of_its_chat",
    )
)


class Comparison(NamedTuple):
    """Logits of an artifact on some processors, and the largest mean KL that they may have."""

    artifact: str
    cpus: tuple[str, ...]
    windows: int
    tokens: int
    kl_to_float: float  # to products with float activations; measured figures are in docs/onnx.md
    kl_to_x86: float  # to this machine's kernels, which are those of its own extensions


class Loop(NamedTuple):
    """Texts that the native library and Python write."""

    artifact: str
    options: tuple[str, ...] = ()
    cpus: tuple[str, ...] = ("neoverse-n1",)


COMPARISONS = (
    Comparison("demo", tuple(CPUS), 2, 32, 0.01, 0.01),
    Comparison("smollm2", ("neoverse-n1",), 2, 32, 0.012, 0.02),
)

QUICK_MODELS = {"cortex-a72": "llama-s4-g32", "max": "llama-s4-g32"}  # each takes one to four minutes there
EXACT = ("--exact", "--characters", "60", "--tokens", "20")  # short: a prompt is fed token by token there
QUICK_LOOPS = (Loop("demo", EXACT), Loop("windowed", EXACT))
LOOPS = (Loop("demo"), Loop("demo", EXACT), Loop("windowed", EXACT, tuple(CPUS)))
WINDOW = {"window": 16, "sinks": 2, "block": 3}


class CannotRun(Exception):
    """The machine lacks something that emulation needs; says nothing about edgekit."""


class Wrong(Exception):
    """arm64 gives a wrong result."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/arm64")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--prompts", type=int, default=12)
    chosen = parser.parse_args()
    try:
        folder = chosen.folder.resolve()
        guest = prepare(folder)
        check_models(folder, guest, QUICK_MODELS if chosen.quick else {})
        for comparison in COMPARISONS:
            compare(comparison, folder, guest)
        compare_loops(folder, guest, QUICK_LOOPS if chosen.quick else LOOPS, 4 if chosen.quick else chosen.prompts)
        if not chosen.quick:
            run_tests(guest)
    except (CannotRun, RealModelMissing, OSError) as reason:
        say(f"arm64 was not tested: {reason}")
        return COULD_NOT_RUN
    except Wrong as reason:
        say(f"arm64: {reason}")
        return WRONG
    return 0


class Guest(NamedTuple):
    """An interpreter for arm64, as a program of this machine: its child processes are emulated too."""

    python: Path
    folder: Path

    def run(self, cpu: str, *arguments: str) -> None:
        # Packed weights are kept by the processor's features, which no two of these share.
        environment = {"ARM64_CPU": cpu, "EDGEKIT_HOME": str(self.folder / "home"), "EDGEKIT_PACKED": "off"}
        status = subprocess.run([str(self.python), *arguments], cwd=ROOT, env={**here(), **environment}).returncode
        if status < 0:
            raise CannotRun(f"the emulator of {cpu} ended by signal {-status}")
        if status:
            raise Wrong(f"{' '.join(arguments)} failed on {cpu}")


def prepare(folder: Path) -> Guest:
    """Make an interpreter for arm64 with the wheels of this environment's versions, unless the folder has one."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        raise CannotRun(f"{platform.system()} on {platform.machine()}; the emulator is the one for Linux on x86-64")
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise CannotRun(f"{tool} is missing; the emulator comes from Debian's packages")
    if not KEYRING.is_file():
        raise CannotRun(f"{KEYRING} is missing, with which Debian's packages are checked")
    folder.mkdir(parents=True, exist_ok=True)
    system, emulator, python = folder / "system", folder / "emulator", folder / "venv/bin/python"
    once(folder, "system", SYSTEM, lambda to: unpack(SYSTEM, "arm64", SYSTEM_PACKAGES, to))
    once(folder, "emulator", EMULATOR, lambda to: unpack(EMULATOR, "amd64", ("qemu-user",), to))
    pins = {each.metadata["Name"].lower(): each.version for each in reversed(list(distributions()))}
    wanted = requirements()
    once(folder, "venv", f"{wanted} {sorted(pins.items())} {ROOT}", lambda to: install(wanted, pins, to))
    # Started as `python`, it finds pyvenv.cfg next to itself, and what it starts as sys.executable is emulated again.
    (folder / "venv/pyvenv.cfg").write_text(f"home = {system / 'usr/bin'}\ninclude-system-site-packages = false\n")
    python.parent.mkdir(exist_ok=True)
    python.write_text(
        f"#!/bin/sh\nexec '{emulator / 'usr/bin/qemu-aarch64'}' -L '{system}' -cpu \"${{ARM64_CPU:-max}}\" "
        f"-0 '{python}' '{system / 'usr/bin/python3.11'}' \"$@\"\n"
    )
    python.chmod(0o755)
    command([str(python), "-c", "import numpy, onnxruntime"], "the emulated interpreter does not start")
    return Guest(python, folder)


def unpack(release: str, architecture: str, packages: Sequence[str], to: Path) -> None:
    """Unpack Debian packages and all that they depend on, with lists and a database of their own."""
    with tempfile.TemporaryDirectory(dir=to.parent) as temporary:
        apt = Path(temporary)
        for name in ("state/lists/partial", "cache/archives/partial"):
            (apt / name).mkdir(parents=True)
        (apt / "status").touch()
        (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror()} {release} main\n")
        settings = {
            "APT::Architecture": architecture, "APT::Architectures": architecture, "APT::Install-Recommends": "0",
            "APT::Sandbox::User": "root", "Dir::State": apt / "state", "Dir::State::status": apt / "status",
            "Dir::Cache": apt / "cache", "Dir::Etc::SourceList": apt / "sources.list",
            "Dir::Etc::SourceParts": "/none", "Acquire::Languages": "none",
        }  # fmt: skip
        get = ["apt-get", "-qq", "-y", *(f"-o{name}={value}" for name, value in settings.items())]
        command([*get, "update"], f"Debian's list of packages for {architecture} cannot be had")
        fetch = ["download", *packages] if release == EMULATOR else ["--download-only", "install", *packages]
        command([*get, *fetch], f"{', '.join(packages)} for {architecture} cannot be had", cwd=apt / "cache/archives")
        for package in (apt / "cache/archives").glob("*.deb"):
            command(["dpkg", "-x", str(package), str(to)], f"{package.name} cannot be unpacked")


def mirror() -> str:
    """The mirror that this machine's own packages come from."""
    listed = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    for line in command(listed, "the package mirror is unknown").splitlines():
        if line.rstrip("/").endswith("/debian"):
            return line
    raise CannotRun("no mirror of Debian among this machine's package sources")


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["onnx"], *extras["structured"]]
    named += [each for each in extras["dev"] if Requirement(each).name in TEST_PACKAGES]
    return [each.partition(";")[0].strip() for each in named]


def install(wanted: Sequence[str], pins: Mapping[str, str], to: Path) -> None:
    """Install wheels for arm64 in this environment's versions, and this checkout as a package next to them."""
    site = to / "lib/python3.11/site-packages"
    site.mkdir(parents=True)
    constraints = to / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items() if name != "edgekit"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *WHEELS]
    command([*pip, "--target", str(site), "-c", str(constraints), *wanted], "wheels for arm64 cannot be had")
    (site / "edgekit.pth").write_text(f"{ROOT}\n{ROOT / 'targets'}\n{to.parent / 'native'}\n")
    facts = site / "edgekit-0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: edgekit\nVersion: 0\n")
    (facts / "entry_points.txt").write_text("[edgekit.targets]\nonnx = edgekit_onnx:OnnxTarget\n")


def once(folder: Path, name: str, made_of: str, make: Callable[[Path], None]) -> None:
    """Make a part of the folder unless it was made from the same inputs before."""
    part, stamp = folder / name, folder / f"{name}.made-of"
    if part.is_dir() and stamp.is_file() and stamp.read_text() == made_of:
        return
    say(f"arm64: making {part}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    make(part)
    stamp.write_text(made_of)


def check_models(folder: Path, guest: Guest, chosen: Mapping[str, str]) -> None:
    """The conformance suite, on models of several families and recipes, or on the one chosen for a processor."""
    script = str(ROOT / "tests/helpers/arm64_models.py")
    command([sys.executable, script, "export", str(folder / "tiny")], "the tiny models cannot be made here")
    for cpu, what in CPUS.items():
        say(f"{cpu} ({what})")
        guest.run(cpu, script, "check", str(folder / "tiny"), *([chosen[cpu]] if cpu in chosen else []))


def compare(comparison: Comparison, folder: Path, guest: Guest) -> None:
    """Compare the logits of an artifact with those of this machine's kernels and of float activations."""
    artifact = folder / f"{comparison.artifact}.edgekit"
    shutil.rmtree(artifact, ignore_errors=True)  # of an earlier run, perhaps by another exporter
    source = "demo" if comparison.artifact == "demo" else str(smollm2())
    options = ["--device", "raspberry-pi-5-8gb", "--target", "onnx", "--recipe", "s4-g32", "--threads", "1"]
    options += [] if source == "demo" else ["--method", "rtn", "--context", "2048"]
    made = [sys.executable, "-m", "edgekit", "export", source, *options, "-o", str(artifact)]
    command(made, f"{comparison.artifact} cannot be exported here")
    size = ("--windows", str(comparison.windows), "--tokens", str(comparison.tokens))
    module = ("-m", "examples.benchmarks.kernel_logits", str(artifact))
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        for name, extra in (("x86", ()), ("float", ("--float",))):
            command([sys.executable, *module, str(out / f"{name}.npz"), *size, *extra], "x86's logits cannot be had")
        for cpu in comparison.cpus:
            guest.run(cpu, *module, str(out / f"{cpu}.npz"), *size)
            to_float, to_x86 = (kl(out / f"{name}.npz", out / f"{cpu}.npz") for name in ("float", "x86"))
            say(judge(comparison, cpu, to_float, to_x86))
        say(f"{comparison.artifact} on x86: KL {kl(out / 'float.npz', out / 'x86.npz'):.5f} to float activations")


def judge(comparison: Comparison, cpu: str, to_float: float, to_x86: float) -> str:
    """Return the figures in a line; `Wrong` where they exceed the bounds, NaN too."""
    line = f"{comparison.artifact} on {cpu}: KL {to_float:.5f} to float activations, {to_x86:.5f} to x86"
    if to_float <= comparison.kl_to_float and to_x86 <= comparison.kl_to_x86:
        return line
    raise Wrong(f"{line}; at most {comparison.kl_to_float} and {comparison.kl_to_x86} are right")


def kl(reference: Path, other: Path) -> float:
    """Mean KL of the next token, in nats."""
    with np.load(reference) as one, np.load(other) as two:
        assert np.array_equal(one["windows"], two["windows"])
        windows = zip(one["windows"].tolist(), one["logits"], two["logits"], strict=True)
        return divergence_of(Pair(tuple(tokens), theirs, ours) for tokens, theirs, ours in windows).kl_mean


def compare_loops(folder: Path, guest: Guest, loops: Sequence[Loop], prompts: int) -> None:
    """Compare texts of the native library, compiled for arm64, with those of Python on arm64."""
    if shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("cmake") is None:
        return say("the native library was not tested: it needs cmake and g++-aarch64-linux-gnu")
    sources = sorted(path for path in (ROOT / "edgekit/apps/native").rglob("*") if path.is_file())
    made_of = sha256(b"".join(path.read_bytes() for path in sources if path.suffix != ".pyc")).hexdigest()
    once(folder, "native", made_of, make_native)
    make_windowed(folder)
    for artifact, options, cpus in loops:
        module = ("-m", "examples.benchmarks.native_texts", str(folder / f"{artifact}.edgekit"))
        for cpu in cpus:
            say(f"texts of the native library on {cpu}: {artifact}{', exact' if '--exact' in options else ''}")
            guest.run(cpu, *module, "--prompts", str(prompts), *options)
    return None


def make_windowed(folder: Path) -> None:
    """The demo with a window so short that answers leave it."""

    def shorten(manifest: dict[str, Any]) -> None:
        manifest["plan"]["cache"] = WINDOW
        manifest["plan"]["storage"]["capacity_tokens"] = WINDOW["window"]

    windowed = folder / "windowed.edgekit"
    shutil.rmtree(windowed, ignore_errors=True)
    shutil.copytree(folder / "demo.edgekit", windowed)
    change_manifest(windowed / "manifest.json", shorten)


def make_native(to: Path) -> None:
    """Compile the native library for arm64, as its wheel has it."""
    try:
        wheel = make_wheel(to, "aarch64")
    except EdgekitError as error:
        raise CannotRun(str(error)) from error
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(to)


def run_tests(guest: Guest) -> None:
    """Run the tests; those that need torch skip themselves."""
    options = ("-q", "-n", "2", "--dist", "loadfile", "-m", "not long and not slow", "-p", "no:cacheprovider")
    guest.run("neoverse-n1", "-m", "pytest", *options, *(f"--deselect={name}" for name in LEFT_OUT), *TESTS)


def here() -> dict[str, str]:
    """Return this process's environment without variables that point another interpreter to this one's packages."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in dropped} | {"OMP_NUM_THREADS": "1"}


def command(arguments: Sequence[str], what: str, cwd: Path = ROOT) -> str:
    """Run a command of this machine; `CannotRun` where it fails, with the last line that it wrote."""
    done = subprocess.run(arguments, cwd=cwd, env=here(), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or [f"status {done.returncode}"]
        raise CannotRun(f"{what}: {said[-1][:300]}")
    return done.stdout


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
