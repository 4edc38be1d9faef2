"""Environments made on a device from a wheel: made once, rebuilt if incomplete, and clear refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_fakes import QUICK, begun, lab_of
from measured import fake, install_fake
from ssh_hosts import Host, needs_ssh, servers

from edgekit.artifact.artifact import open_artifact
from edgekit.common.files import file_sha256
from edgekit.errors import DeviceFailed, InvalidInput
from edgekit.lab import remote_bootstrap as prepare_there
from edgekit.lab.devices import DeviceSpec, Prepare, connect
from edgekit.lab.matrix import read_lab
from edgekit.lab.prepared import extra_of, remote_python
from edgekit.lab.prepared import prepare as prepare_now
from edgekit.lab.run import run_lab
from edgekit.lab.ssh import SshDevice
from edgekit.lab.store import LabStore

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our packages without edgekit, pip and onnxruntime, as if the remote machine had edgekit's dependencies."""
    out = tmp_path_factory.mktemp("lent")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("edgekit", "_edgekit", "__", "pip", "setuptools", "onnxruntime")):
            (out / path.name).symlink_to(path)
    return out


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Host]]:
    with servers(tmp_path) as begin:
        yield begin


def prepared_spec(host: Host, prepare: Prepare, path: str, **options: Any) -> DeviceSpec:
    spec = host.spec("host", **{"python": sys.executable, "repeats": 1, "loads": 1, **options})
    return spec.model_copy(update={"prepare": prepare, "environment": {**spec.environment, "PYTHONPATH": path}})


@pytest.mark.slow
@needs_ssh
def test_a_device_that_has_only_python_measures_with_the_wheel_it_is_sent(
    start: Callable[[], Host], tmp_path: Path, wheel: Path, lent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake(tmp_path / "site", monkeypatch)
    artifact = fake(tmp_path / "one")
    house = tmp_path / "house"
    house.mkdir()
    shutil.copy(wheel, house)  # so that nothing is looked for on a network
    host = start()
    prepare = Prepare(wheel=str(wheel), wheelhouse=str(house))
    spec = prepared_spec(host, prepare, f"{tmp_path / 'site'}:{lent}")
    # Half of the wheel is there from a transfer that was cut.
    held = host.home / "lab/wheels" / file_sha256(wheel)
    held.mkdir(parents=True)
    (held / f"{wheel.name}.part").write_bytes(wheel.read_bytes()[:100_000])
    device = connect(spec)
    assert isinstance(device, SshDevice)
    assert "is installed before the first measurement" in device.ping(timeout_s=60)
    found = device.measure(artifact.folder, Path("quick"), timeout_s=120)
    assert found.subject.artifact_sha256 == artifact.sha256 and found.status in ("valid", "contended", "throttled")
    (made,) = (host.home / "lab").glob("env-*/")
    assert next(made.glob("lib/python*/site-packages/edgekit/__init__.py")).is_file()
    stood = (made / "pyvenv.cfg").stat().st_mtime_ns
    again = prepare_now(
        prepare, artifact.plan, device.folder, device._python, f"PYTHONPATH={lent}", device._ask, device._push_whole
    )
    assert again == f"{made}/bin/python"
    assert (made / "pyvenv.cfg").stat().st_mtime_ns == stood, "the environment was made twice"


def asked(folder: Path, wheel: Path, **known: Any) -> dict[str, Any]:
    place = {"place": str(folder / "env-a"), "wheel": str(wheel), "links": [str(wheel.parent)], "index": None}
    return {**place, "extra": None, "system_packages": False, **known}


def there(question: dict[str, Any], *, python: str = sys.executable, path: str = "") -> tuple[int, str, str]:
    """Run the bootstrap script; return its exit code, stdout and last line of stderr."""
    script = Path(prepare_there.__file__).read_bytes()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path}
    done = subprocess.run([python, "-", json.dumps(question)], input=script, capture_output=True, env=environment)
    return done.returncode, done.stdout.decode(), (done.stderr.decode().splitlines() or [""])[-1]


@pytest.mark.slow
def test_missing_target_packages_are_reported_in_one_line(tmp_path: Path, wheel: Path, lent: Path) -> None:
    code, told, why = there(asked(tmp_path, wheel, extra="onnx"), path=str(lent))
    assert code == 1 and told == "" and why.startswith("pip failed: ERROR:") and "onnxruntime" in why
    assert (tmp_path / "env-a/pyvenv.cfg").exists() and not (tmp_path / "env-a/ready").exists()
    (tmp_path / "env-a/half").touch()  # as a cut one would be found, which is begun anew
    code, told, why = there(asked(tmp_path, wheel), path=str(lent))
    assert (code, told) == (0, f"{tmp_path / 'env-a/bin/python'}\n"), why
    assert (tmp_path / "env-a/ready").exists() and not (tmp_path / "env-a/half").exists()


def test_python_without_venv_names_the_missing_package(tmp_path: Path) -> None:
    (tmp_path / "ensurepip.py").write_text("raise ImportError('not in this package of Python')\n")
    code, _, why = there(asked(tmp_path, tmp_path / "any.whl"), path=str(tmp_path))
    assert code == 1 and "apt install python3-venv" in why


def test_only_the_newest_environments_are_kept(tmp_path: Path) -> None:
    for number in range(12):
        place = tmp_path / f"env-{number:02}"
        place.mkdir()
        (place / "ready").touch()
        os.utime(place / "ready", (number, number))
    made = prepare_there.prepare({"place": str(tmp_path / "env-03")})
    assert made == tmp_path / "env-03/bin/python"
    assert sorted(path.name for path in tmp_path.glob("env-*/")) == ["env-03"] + [f"env-{n:02}" for n in range(5, 12)]


@pytest.mark.parametrize(
    ("answer", "said"),
    [("3 9 2", "is Python 3.9.2, and edgekit needs 3.11"), ("hello", "is Python 'hello', and"), ("3 13 1", "")],
)
def test_a_python_that_is_too_old_is_refused_before_anything_is_sent(answer: str, said: str) -> None:
    def ask(command: str, timeout_s: float, given: bytes = b"") -> bytes:
        return answer.encode()

    if not said:
        assert remote_python(ask, "python3", 5.0) == "3.13.1"
        return
    with pytest.raises(DeviceFailed, match=said):
        remote_python(ask, "python3", 5.0)


@pytest.mark.slow
@needs_ssh
def test_a_device_that_cannot_be_prepared_is_quarantined(
    start: Callable[[], Host], tmp_path: Path, wheel: Path
) -> None:
    host = start()
    lab = lab_of(tmp_path, 1)
    spec = prepared_spec(host, Prepare(wheel=str(wheel)), "", python="/nowhere/python")
    lab = lab.model_copy(update={"devices": (spec,)})
    with LabStore(tmp_path / "lab.sqlite") as store:
        run = begun(store, lab)
        info = run_lab(lab, store, run, {"host": connect(spec)}, clock=QUICK)
        assert info.states == {"lost": 1, "quarantined": 3}
        (why,) = {attempt.why for attempt in store.attempts(run)}
    assert "there is no" in why and "/nowhere/python" in why and "\n" not in why


def test_the_extra_is_that_of_the_backend_or_of_the_target(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "edgekit-9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "edgekit-9.dist-info/METADATA", "Name: edgekit\nProvides-Extra: onnx\nProvides-Extra: cuda\n\n"
        )
    plan = open_artifact(fake(tmp_path / "one").folder).plan
    found = {
        (target, backend): extra_of(path, plan.model_copy(update={"target": target, "backend": backend}))
        for target, backend in (("onnx", "cpu"), ("onnx", "cuda"), ("ours", "cpu"))
    }
    assert found == {("onnx", "cpu"): "onnx", ("onnx", "cuda"): "cuda", ("ours", "cpu"): None}
    path.write_bytes(b"no wheel")
    with pytest.raises(InvalidInput, match="not a wheel of edgekit"):
        extra_of(path, plan)


def test_a_kind_that_prepares_nothing_refuses_it() -> None:
    with pytest.raises(InvalidInput, match="kind local prepares no environment"):
        connect(DeviceSpec(name="here", kind="local", prepare=Prepare(wheel="edgekit-1-py3-none-any.whl")))


@pytest.mark.parametrize("index", ["-r file", "https://user:secret@host/simple", "ftp://host", "https://host/a b"])
def test_an_index_is_an_address_without_a_secret(index: str) -> None:
    with pytest.raises(ValueError, match="an index is an address"):
        Prepare(wheel="a.whl", index=index)


def test_wheel_paths_are_relative_to_the_lab_file(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(
        "name: a\nworkloads: [quick]\nartifacts: [one]\ndevices:\n"
        "  - {name: a, kind: ssh, address: host, "
        "prepare: {wheel: dist/edgekit-1-py3-none-any.whl, wheelhouse: wheels}}\n"
    )
    (device,) = read_lab(tmp_path / "lab.yaml").devices
    assert device.prepare is not None
    assert device.prepare.wheel == str(tmp_path / "dist/edgekit-1-py3-none-any.whl")
    assert device.prepare.wheelhouse == str(tmp_path / "wheels")
