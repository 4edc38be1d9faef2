"""HTTPS: trusted and refused certificates, which the tests make."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_artifacts import install
from published import device_profile, make_artifact
from site_server import Fault, SiteServer, site_server

pytest.importorskip("cryptography", reason="the extra `sign` is not installed")

from certificates import Keys

from edgekit.apps.delivery import publish
from edgekit.artifact.artifact import verify
from edgekit.cli import command
from edgekit.errors import InvalidInput, TransferFailed


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Trust the test's authority through SSL_CERT_FILE, like a company's own."""
    install(tmp_path / "target", monkeypatch)
    publish([make_artifact(tmp_path / "artifact").folder], tmp_path / "site", release="1")
    made = Keys(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.root))
    return made


def pulled(server: SiteServer, tmp_path: Path, *options: str) -> Result:
    device = device_profile(tmp_path)
    asked = ["pull", server.url, "-o", str(tmp_path / "app"), "--device", device, "--timeout", "5", *options]
    return CliRunner().invoke(command, asked)


def test_a_site_with_a_trusted_certificate_needs_no_option(tmp_path: Path, keys: Keys) -> None:
    with site_server(tmp_path / "site", keys.server(tmp_path, "127.0.0.1")) as server:
        done = pulled(server, tmp_path)
        assert done.exit_code == 0 and server.url.startswith("https:"), done.output
    verify(tmp_path / "app")


@pytest.mark.parametrize(
    ("host", "days", "own_authority", "reason"),
    [
        ("127.0.0.1", (-1, 30), False, "certificate is not trusted: certificate signature failure"),
        ("127.0.0.2", (-1, 30), True, "certificate is not trusted: IP address mismatch"),
        ("127.0.0.1", (-30, -1), True, "certificate is not trusted: certificate has expired"),
    ],
    ids=["another authority", "another host", "expired"],
)
def test_untrusted_certificate_ends_the_pull_at_once(
    tmp_path: Path, keys: Keys, host: str, days: tuple[int, int], own_authority: bool, reason: str
) -> None:
    (tmp_path / "stranger").mkdir()
    authority = keys if own_authority else Keys(tmp_path / "stranger")
    with site_server(tmp_path / "site", authority.server(tmp_path, host, *days)) as server:
        done = pulled(server, tmp_path)
    assert isinstance(done.exception, TransferFailed)
    with pytest.raises(TransferFailed, match=reason):
        raise done.exception
    assert server.paths == [] and not list((tmp_path / "app" / "versions").glob("*"))


def test_https_never_turns_into_http(tmp_path: Path, keys: Keys) -> None:
    with (
        site_server(tmp_path / "site") as plain,
        site_server(tmp_path / "site", keys.server(tmp_path, "127.0.0.1")) as server,
    ):
        refused = pulled(plain, tmp_path)
        assert isinstance(refused.exception, InvalidInput) and "--allow http" in str(refused.exception)
        server.fault = lambda number, asked: Fault(status=302, headers={"Location": plain.url + asked.name})
        moved = pulled(server, tmp_path)
        assert isinstance(moved.exception, TransferFailed) and "nothing else is asked" in str(moved.exception)
        assert plain.paths == []
        assert pulled(plain, tmp_path, "--allow", "http").exit_code == 0
