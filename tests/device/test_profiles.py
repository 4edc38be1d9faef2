"""Device profiles: every figure has a source, budgets are those that were observed, bad files are one clear line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from entry_points import declare
from hypothesis import given, settings, strategies as st

from edgekit.common.parsing import parse_yaml
from edgekit.contracts.device import DeviceProfile, SourcedBytes, SourcedCount, SourcedNumber, parse_version
from edgekit.device.catalogue import all_profiles, profile_sha256
from edgekit.device.load import load_profile
from edgekit.errors import EdgekitError, InvalidInput, UnknownName

ROOT = Path(__file__).parents[2]
PROFILES = all_profiles()
EVERY = pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
MIB, GIB = 1 << 20, 1 << 30
ENTITLED = frozenset({"com.apple.developer.kernel.increased-memory-limit"})
EXAMPLE = (ROOT / "examples" / "profiles" / "reception-kiosk.yaml").read_text()


@pytest.fixture(autouse=True)
def no_profiles_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))


def facts(profile: DeviceProfile) -> Iterator[tuple[str, SourcedBytes | SourcedNumber | SourcedCount]]:
    for field in type(profile).model_fields:
        value = getattr(profile, field)
        if isinstance(value, SourcedBytes | SourcedNumber | SourcedCount):
            yield field, value
    for index, limit in enumerate(profile.app_limits):
        yield f"app_limits.{index}", limit.limit


@EVERY
def test_every_figure_has_a_source(profile: DeviceProfile) -> None:
    for field, fact in facts(profile):
        source = fact.source.lower()
        assert len(source) >= 8, f"{profile.name}: {field}: {source}"
        if fact.confidence == "documented":
            assert "from memory" not in source and "assumption" not in source, f"{field}: {source}"
            assert len(source) >= 15 and any(mark in source for mark in ".#/,("), f"{field}: {source}"
        if fact.confidence == "derived":
            assert any(character.isdigit() for character in source) or "definition" in source, f"{field}: {source}"
        assert "notes/" not in source and "/work" not in source and "/home" not in source


@EVERY
def test_every_budget_fits_its_device(profile: DeviceProfile) -> None:
    memory = (profile.vram or profile.ram).value
    versions = {profile.os_version, *(limit.from_version for limit in profile.app_limits), "1", "999"}
    for version in versions:
        for entitlements in (frozenset[str](), ENTITLED):
            budget = profile.budget(version, entitlements)
            assert 0 < budget.private_bytes <= profile.ram.value or profile.vram is not None
            assert 0 < budget.total_bytes < memory
            assert budget.why


@EVERY
def test_an_entitlement_never_lowers_a_budget_where_both_limits_are_known(profile: DeviceProfile) -> None:
    for limit in profile.app_limits:
        plain = profile.budget(limit.from_version)
        assert profile.budget(limit.from_version, ENTITLED).private_bytes >= plain.private_bytes


@EVERY
def test_usable_bandwidth_is_below_peak(profile: DeviceProfile) -> None:
    assert profile.usable_bandwidth_gb_s.value < profile.peak_bandwidth_gb_s.value


@EVERY
def test_something_runs_on_every_device(profile: DeviceProfile) -> None:
    known = {
        "onnx": {"cpu", "cuda"},
        "mlx": {"metal", "cpu"},
        "executorch": {"xnnpack", "coreml", "vulkan"},
        "llamacpp": {"cpu", "metal", "cuda", "vulkan"},
    }
    assert profile.targets
    for target, backends in profile.targets.items():
        assert backends and set(backends) <= known[target]


@pytest.mark.parametrize(
    ("name", "version", "entitlements", "private_bytes"),
    [
        pytest.param("iphone-13-pro", None, frozenset[str](), 3072 * MIB, id="iPhone 13 Pro"),
        pytest.param("iphone-13-pro", None, ENTITLED, 4_200_000_000, id="iPhone 13 Pro, entitled"),
        pytest.param("iphone-15-pro", "18.3", frozenset[str](), 3_000_000_000, id="iPhone 15 Pro"),
        pytest.param("iphone-15-pro", "18.3", ENTITLED, 6_000_000_000, id="iPhone 15 Pro, entitled"),
        pytest.param("iphone-15-pro", "18.3", frozenset({"increased-memory-limit"}), 6_000_000_000, id="short name"),
        pytest.param("iphone-15-pro", "18.3", frozenset({"extended-virtual-addressing"}), 3_000_000_000, id="another"),
        pytest.param("ipad-8gb", "26.3", frozenset[str](), 6_000_000_000, id="iPadOS 26.3"),
        pytest.param("ipad-8gb", "26.3.9", frozenset[str](), 6_000_000_000, id="iPadOS 26.3.9"),
        pytest.param("ipad-8gb", "26.4", frozenset[str](), 3_000_000_000, id="iPadOS 26.4"),
        pytest.param("ipad-8gb", "26.5.1", frozenset[str](), 3_000_000_000, id="iPadOS 26.5.1"),
        pytest.param("ipad-8gb", "18.7", ENTITLED, 6_000_000_000, id="iPadOS 18.7, entitled"),
        pytest.param("ipad-8gb", "27.0", frozenset[str](), 3_000_000_000, id="an iPadOS that nobody measured"),
        pytest.param("galaxy-s25-ultra", None, frozenset[str](), 6_000_000_000, id="Samsung Heimdall"),
        pytest.param("m4-max-64gb", None, frozenset[str](), 48 * GIB, id="Metal on 64 GB"),
        pytest.param("rtx-4090", None, frozenset[str](), 23 * GIB, id="VRAM less a reserve"),
    ],
)
def test_the_limits_that_were_observed_hold(
    name: str, version: str | None, entitlements: frozenset[str], private_bytes: int
) -> None:
    assert PROFILES[name].budget(version, entitlements).private_bytes == private_bytes


def test_mapped_pages_are_nearly_free_on_ios_and_charged_by_samsung() -> None:
    phone, galaxy = PROFILES["iphone-13-pro"].budget(), PROFILES["galaxy-s25-ultra"].budget()
    assert phone.total_bytes == 4 * GIB and phone.private_bytes == 3 * GIB
    assert "not charged" in phone.why
    assert galaxy.total_bytes == galaxy.private_bytes and "charged too" in galaxy.why


def test_unknown_os_version_gets_the_lowest_known_limit_and_a_note() -> None:
    why = PROFILES["ipad-8gb"].budget("26.6").why
    assert "no limit is known for iPadOS 26.6" in why and "2.79 GiB" in why


@pytest.mark.parametrize("text", ["", "26.x", "-1", "1.2.3.4.5", "٣", "1..2", " 26"])
def test_invalid_os_version_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="OS version"):
        parse_version(text)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_versions_compare_by_number_and_not_by_letter(one: list[int], other: list[int]) -> None:
    padded = [part + [0] * (4 - len(part)) for part in (one, other)]
    first, second = (parse_version(".".join(map(str, part))) for part in (one, other))
    assert (first < second) == (padded[0] < padded[1])
    assert (first == second) == (padded[0] == padded[1])


def test_profiles_are_found_by_name_path_and_folder(tmp_path: Path) -> None:
    place = tmp_path / "own"
    place.mkdir()
    (place / "reception-kiosk.yaml").write_text(EXAMPLE)
    assert load_profile("reception-kiosk", [place]) == load_profile(place / "reception-kiosk.yaml")
    assert load_profile(str(place / "reception-kiosk.yaml")).name == "reception-kiosk"
    assert "reception-kiosk" in all_profiles([place]) and "reception-kiosk" not in all_profiles()


def test_a_users_profile_overrides_the_installed_one(tmp_path: Path) -> None:
    own = tmp_path / "home" / "profiles"
    own.mkdir(parents=True)
    text = (ROOT / "profiles" / "pixel-9.yaml").read_text().replace('title: "Pixel 9"', 'title: "my Pixel 9"')
    (own / "pixel-9.yaml").write_text(text)
    assert load_profile("pixel-9").title == "my Pixel 9"
    assert all_profiles()["pixel-9"].title == "my Pixel 9"


def test_packages_offer_profiles_through_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "acme_kiosks" / "profiles"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "reception-kiosk.yaml").write_text(EXAMPLE)
    declare(tmp_path, {"edgekit.profiles": {"kiosks": "acme_kiosks.profiles"}}, monkeypatch)
    assert load_profile("reception-kiosk").title == "Reception kiosk, 2025 model"
    assert load_profile("pixel-9").name == "pixel-9"


def test_an_unknown_name_lists_near_matches() -> None:
    with pytest.raises(UnknownName, match=r"did you mean macbook-m4-16gb"):
        load_profile("macbok-m4-16gb")
    with pytest.raises(UnknownName, match="jetson-orin-nx-16gb"):
        load_profile("orin")
    with pytest.raises(UnknownName, match="edgekit devices"):
        load_profile("zzzz")


def test_the_hash_depends_on_the_facts_and_not_on_the_layout(tmp_path: Path) -> None:
    one = parse_yaml(EXAMPLE.encode(), DeviceProfile, "one")
    other = parse_yaml(("# a remark\n" + EXAMPLE).encode(), DeviceProfile, "other")
    changed = parse_yaml(EXAMPLE.replace("value: 16GiB", "value: 8GiB", 1).encode(), DeviceProfile, "changed")
    assert profile_sha256(one) == profile_sha256(other) != profile_sha256(changed)


def without(key: str) -> str:
    return "".join(line + "\n" for line in EXAMPLE.splitlines() if not line.startswith(f"{key}:"))


LIMIT = '  - {from_version: "%s", limit: {value: 2GiB, source: "seen once", confidence: recalled}}\n'
PUBLISHED = "measured: [{model: m, recipe: s8, engine: %s, %s, source: seen once}]\n"

BAD = {
    "an unknown key": (EXAMPLE + "colour: red\n", r":\d+: colour: unknown field"),
    "a wrong type": (EXAMPLE.replace("value: 16GiB", "value: [16]", 1), r":\d+: ram\.value: .*valid integer"),
    "a size that is none": (EXAMPLE.replace("value: 16GiB", "value: 16 gigs", 1), r":\d+: ram\.value: .*16 gigs"),
    "a negative size": (EXAMPLE.replace("value: 16GiB", "value: -1", 1), r":\d+: ram\.value: .*greater than 0"),
    "an absurd size": (EXAMPLE.replace("value: 16GiB", "value: 99999TiB", 1), r":\d+: ram\.value"),
    "a missing field": (without("chip"), r":\d+: chip: is missing"),
    "a figure without a source": (re.sub(r"\n  source:.*", "", EXAMPLE, count=1), r":\d+: ram\.source: is missing"),
    "a misspelt key": (EXAMPLE.replace("  source:", "  sauce:", 1), r":\d+: ram\.sauce: unknown field"),
    "an empty source": (
        EXAMPLE.replace('source: "the kiosk\'s data sheet"', 'source: ""', 1),
        r":\d+: ram\.source: .*at least 1",
    ),
    "a number of bytes for a name": (EXAMPLE.replace("name: reception-kiosk", "name: 5"), r":\d+: name: .*string"),
    "a name with capitals": (EXAMPLE.replace("name: reception-kiosk", "name: Kiosk"), r":\d+: name: "),
    "a version as a number": (
        EXAMPLE.replace('os_version: "24.04"', "os_version: 24.04"),
        r":\d+: os_version: .*string",
    ),
    "a version that is none": (
        EXAMPLE.replace('os_version: "24.04"', "os_version: noble"),
        r":\d+: os_version: .*noble",
    ),
    "usable above peak": (
        EXAMPLE.replace("value: 51.2", "value: 12", 1),
        r":\d+: usable_bandwidth_gb_s: .*more than peak",
    ),
    "an engine above peak": (
        EXAMPLE + "engines: {cpu: {bandwidth_gb_s: {value: 52, source: seen once, confidence: recalled}}}\n",
        r":\d+: engines: 52 is more than peak_bandwidth_gb_s, 51.2",
    ),
    "a measured engine that does not run": (
        EXAMPLE + PUBLISHED % ("llamacpp.cpu", "decode_tokens_per_s: 5"),
        r":\d+: measured: llamacpp.cpu is no engine of",
    ),
    "a measured row without a figure": (EXAMPLE + PUBLISHED % ("onnx.cpu", "context: 5"), r":\d+: measured: .*neither"),
    "an impossible speed": (
        EXAMPLE + PUBLISHED % ("onnx.cpu", "decode_tokens_per_s: -5"),
        r":\d+: measured\.0\.decode_tokens_per_s: .*greater than 0",
    ),
    "another unit": (
        EXAMPLE + PUBLISHED % ("onnx.cpu", "decode_ms: 5"),
        r":\d+: measured\.0\.decode_ms: unknown field",
    ),
    "nothing left": (EXAMPLE.replace("value: 3GiB", "value: 16GiB", 1), r":\d+: reserve: leaves nothing"),
    "overlapping ranges": (
        EXAMPLE + "app_limits:\n" + LIMIT % "1.0" + LIMIT % "2.0",
        r":\d+: app_limits: .*from 1\.0 and from 2\.0 overlap",
    ),
    "not a number": (EXAMPLE.replace("value: 51.2", "value: .nan", 1), r":\d+: peak_bandwidth_gb_s\.value: .*nan"),
    "infinity": (EXAMPLE.replace("value: 51.2", "value: .inf", 1), r":\d+: peak_bandwidth_gb_s\.value: .*inf"),
    "a key twice": (EXAMPLE + "name: again\n", r":\d+: the whole: the key 'name' occurs twice"),
    "a key of a fact twice": (
        EXAMPLE.replace("  value: 16GiB", "  value: 16GiB\n  value: 8GiB", 1),
        r":\d+: ram: the key 'value' occurs twice",
    ),
    "an alias": ("a: &x [1]\nb: *x\n", r":2: aliases"),
    "a bomb": ("a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n", r":2: aliases"),
    "deep nesting": ("a: " + "[" * 5000 + "]" * 5000, r":1: nested more than 32 deep"),
    "an object of Python": ("name: !!python/object/apply:os.system [echo]\n", r":\d+: "),
    "no mapping": ("- 1\n", r":1: the whole: "),
    "nothing": ("", "is empty"),
    "no YAML": ("{unclosed: ", r":\d+: not valid YAML"),
    "a tab": ("name:\n\t- x\n", r":2: not valid YAML"),
    "a control character": ("name: \x07\n", "not valid YAML"),
    "two documents": (EXAMPLE + "---\n" + EXAMPLE, r":\d+: not valid YAML"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_profile_is_one_line_with_file_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "reception-kiosk.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=message) as caught:
        load_profile(file)
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_line_in_an_error_is_the_line_of_the_figure(tmp_path: Path) -> None:
    lines = EXAMPLE.splitlines()
    at = next(index for index, line in enumerate(lines) if line.strip() == "value: 51.2")
    lines[at] = "  value: fast"
    with pytest.raises(InvalidInput, match=rf"^kiosk:{at + 1}: peak_bandwidth_gb_s\.value"):
        parse_yaml("\n".join(lines).encode(), DeviceProfile, "kiosk")


@pytest.mark.parametrize(
    "kind", ["missing", "folder", "loop", "huge", "binary", "pipe", "not its name", "reserved name"]
)
def test_a_file_that_cannot_be_a_profile_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "x.yaml"
    if kind == "folder":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "huge":
        file.write_bytes(b"#" * (2 << 20))
    elif kind == "binary":
        file.write_bytes(b"\xff\xfe\x00name: x")
    elif kind == "pipe":
        import os

        os.mkfifo(file)
    elif kind == "not its name":
        file.write_text(EXAMPLE)
    elif kind == "reserved name":
        file = tmp_path / "this.yaml"
        file.write_text(EXAMPLE.replace("name: reception-kiosk", "name: this"))
    with pytest.raises(InvalidInput) as caught:
        load_profile(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_profile_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not a folder"):
        all_profiles([tmp_path / "absent"])


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_arbitrary_text_raises_only_edgekit_errors(data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from(EXAMPLE.splitlines(keepends=True)) | st.text(max_size=30), max_size=40))
    check("".join(pieces))


@given(position=st.integers(0, len(EXAMPLE)), cut=st.integers(0, 30), put=st.text(max_size=8))
@settings(deadline=None, max_examples=250)
def test_a_damaged_profile_is_read_or_refused(position: int, cut: int, put: str) -> None:
    check(EXAMPLE[:position] + put + EXAMPLE[position + cut :])


def check(text: str) -> None:
    refusal = ""
    try:
        profile = parse_yaml(text.encode(errors="surrogatepass"), DeviceProfile, "fuzz.yaml")
    except EdgekitError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith("fuzz.yaml") and "\n" not in refusal
    else:
        assert profile.budget().total_bytes > 0


def test_profile_page_shows_the_example_file() -> None:
    page = (ROOT / "docs" / "profiles.md").read_text()
    assert f"```yaml\n{EXAMPLE}```" in page


def test_the_page_about_profiles_explains_every_field() -> None:
    page = (ROOT / "docs" / "profiles.md").read_text()
    for field in DeviceProfile.model_fields:
        assert f"`{field}`" in page, field


def test_the_limits_that_the_page_shows_can_be_read() -> None:
    page = (ROOT / "docs" / "profiles.md").read_text()
    limits = next(block for block in page.split("```yaml\n")[1:] if block.startswith("app_limits:")).split("```")[0]
    profile = parse_yaml((EXAMPLE + limits).encode(), DeviceProfile, "page")
    assert profile.budget("26.3").private_bytes == 6_000_000_000
    assert profile.budget("26.5").private_bytes == 3_000_000_000
