"""Signatures: accepted ones, and the message of each refusal. The tests make keys and certificates."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_artifacts import install
from published import device_profile, make_artifact
from site_server import site_server

import edgekit
from edgekit.apps.delivery import publish, pull, withdraw
from edgekit.apps.delivery.signing import Signer, check_signature, sign
from edgekit.apps.delivery.site_index import INDEX
from edgekit.artifact.artifact import read_manifest, seal
from edgekit.cli import command
from edgekit.common.staging import staging_for
from edgekit.contracts.manifest import SIGNATURE
from edgekit.errors import DamagedArtifact, InvalidInput, UntrustedSignature

pytest.importorskip("model_signing", reason="the extra `sign` is not installed")
pytest.importorskip("OpenSSL", reason="the extra `sign` is not installed")

from certificates import NOW, Keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "target", monkeypatch)
    return make_artifact(tmp_path / "artifact").folder


def test_a_signed_artifact_opens_with_its_key_only(folder: Path, keys: Keys) -> None:
    with pytest.raises(UntrustedSignature, match="is not signed"):
        edgekit.open(folder, require_signature=keys.public)
    sign(folder, Signer(keys.key))
    for _ in range(2):
        edgekit.open(folder, require_signature=keys.public).close()
    with pytest.raises(UntrustedSignature, match="which is not among"):
        edgekit.open(folder, require_signature=keys.other_public)


def test_paths_may_be_relative(folder: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    for _ in range(2):  # the second time, a signature lies there
        sign(folder.name, Signer(keys.key))
        for path in (Path(folder.name), folder):
            assert "publisher.pub" in check_signature(path, keys.public)
    monkeypatch.chdir(folder)
    sign(".", Signer(keys.key))
    edgekit.open(".", require_signature=keys.public).close()
    command = [sys.executable, "-m", "model_signing", "verify", "key", ".", "--signature", SIGNATURE]
    done = subprocess.run([*command, "--public_key", str(keys.public)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # the tool of the format's authors


def test_any_key_of_a_folder_is_trusted(folder: Path, keys: Keys, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    for path in (keys.other_public, keys.root, keys.public):
        shutil.copy(path, trusted)
    sign(folder, Signer(keys.key))
    assert "publisher.pub" in check_signature(folder, trusted)


def test_a_signature_by_someone_else_who_claims_the_key_is_refused(folder: Path, keys: Keys) -> None:
    sign(folder, Signer(keys.key))
    hint = (folder / SIGNATURE).read_text().partition('"hint":"')[2][:64]
    sign(folder, Signer(keys.other_key))
    text = (folder / SIGNATURE).read_text()
    (folder / SIGNATURE).write_text(text.replace(text.partition('"hint":"')[2][:64], hint))
    with pytest.raises(UntrustedSignature, match="it was forged or changed"):
        check_signature(folder, keys.public)


def test_a_changed_byte_is_refused(folder: Path, keys: Keys) -> None:
    sign(folder, Signer(keys.key))
    _flip(folder / "model.safetensors")
    with pytest.raises(UntrustedSignature, match=r"model\.safetensors is not the file that was signed"):
        check_signature(folder, keys.public)
    with pytest.raises(DamagedArtifact, match="its bytes are not those that were sealed"):
        edgekit.open(folder, require_signature=keys.public)


def test_a_swapped_file_of_the_same_size_and_time_is_refused(folder: Path, keys: Keys) -> None:
    """An attacker who seals the artifact again passes every check except the signature."""
    sign(folder, Signer(keys.key))
    edgekit.open(folder, require_signature=keys.public).close()
    old = (folder / "model.safetensors").stat()
    manifest = read_manifest(folder).manifest
    final = folder.with_name("sealed-anew")
    staging = staging_for(final, 0)
    for name in manifest.files:
        shutil.copy(folder / name, staging / name)
    _flip(staging / "model.safetensors")
    seal(staging, final, manifest.plan, weights_sha256="0" * 64, tools={"fake": "1"}, self_check="a fake")
    shutil.copy(folder / SIGNATURE, final)
    shutil.rmtree(folder)
    final.rename(folder)
    os.utime(folder / "model.safetensors", ns=(old.st_atime_ns, old.st_mtime_ns))
    assert (folder / "model.safetensors").stat().st_size == old.st_size
    edgekit.open(folder).close()
    with pytest.raises(UntrustedSignature, match="is not the file that was signed: it was changed or swapped"):
        edgekit.open(folder, require_signature=keys.public)


def test_certificates_must_be_valid_now_and_from_the_authority(folder: Path, keys: Keys, tmp_path: Path) -> None:
    sign(folder, Signer(keys.key, keys.certificate))
    assert check_signature(folder, keys.root) == "'publisher'"
    edgekit.open(folder, require_signature=keys.root).close()
    with pytest.raises(UntrustedSignature, match="the certificate of 'publisher' expired on"):
        check_signature(folder, keys.root, now=NOW + timedelta(days=31))
    stranger = Keys(tmp_path)
    with pytest.raises(UntrustedSignature, match="is not from a trusted authority"):
        check_signature(folder, stranger.root)
    sign(folder, Signer(keys.key, keys.expired))
    with pytest.raises(UntrustedSignature, match="the certificate of 'publisher' expired on"):
        edgekit.open(folder, require_signature=keys.root)


@pytest.mark.parametrize(
    ("root", "middle", "named"),
    [((-300, 3000), (-200, -1), "middle"), ((-300, -1), (-200, 3000), "authority"), ((-300, 3000), (-200, 3000), None)],
)
def test_every_certificate_of_the_chain_must_be_valid_now(
    folder: Path, keys: Keys, tmp_path: Path, root: tuple[int, int], middle: tuple[int, int], named: str | None
) -> None:
    authority, intermediate, leaf = keys.chain(tmp_path, root, middle)
    sign(folder, Signer(keys.key, leaf, (intermediate,)))
    if named is None:
        assert check_signature(folder, authority) == "'publisher'"
        return
    with pytest.raises(UntrustedSignature, match=f"certificate of 'CN={named}', on the way .* has expired; sign it"):
        check_signature(folder, authority)


def test_sigstore_is_used_only_on_request_and_named_without_network(
    folder: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def unreachable(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def typed(*words: object) -> Result:
        return CliRunner().invoke(command, list(map(str, words)))

    assert typed("sign", folder, "--key", keys.key).exit_code == 0
    assert typed("verify", folder, "--signature", keys.public).exit_code == 0
    assert asked == []
    signed = (folder / SIGNATURE).read_bytes()
    refused = typed("sign", folder, "--keyless")
    assert isinstance(refused.exception, InvalidInput) and "sign with --key" in str(refused.exception)
    assert asked and "Sigstore did not answer" in str(refused.exception) and "\n" not in str(refused.exception)
    assert (folder / SIGNATURE).read_bytes() == signed  # the former signature stays
    asked.clear()
    account = ("--identity", "me@example.org", "--identity-provider", "https://accounts.example.org")
    unchecked = typed("verify", folder, *account)
    assert isinstance(unchecked.exception, UntrustedSignature) and asked
    assert "cannot be verified: Sigstore did not answer" in str(unchecked.exception)


def test_a_network_that_goes_away_while_an_account_signs_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the first request to Sigstore everything is real, with the roots of trust that its package has."""
    from sigstore import oidc
    from sigstore.models import ClientTrustConfig

    read = ClientTrustConfig.production
    asked: list[str] = []
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(ClientTrustConfig, "production", lambda: read(offline=True))
    monkeypatch.setattr(oidc.Issuer, "__init__", lambda self, url: asked.append(url))
    monkeypatch.setattr(oidc, "detect_credential", lambda client: _identity_token(client))

    def unreachable(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    with pytest.raises(
        InvalidInput, match=r"cannot be signed: Sigstore did not answer as expected \(.*fulcio"
    ) as refused:
        sign(folder, Signer())
    assert "\n" not in str(refused.value) and str(refused.value).endswith("sign with --key where there is none")
    assert asked == ["https://oauth2.sigstore.dev/auth", "fulcio.sigstore.dev"]
    assert not (folder / SIGNATURE).exists()


def _identity_token(client: str) -> str:
    """A token as an account's provider issues it; only Sigstore checks its signature."""
    now = int(time.time())  # not NOW, which may be older than the token lives
    claims = {"iss": "https://oauth2.sigstore.dev/auth", "sub": "1", "email": "me@example.org", "email_verified": True}
    claims |= {"aud": client, "iat": now, "nbf": now, "exp": now + 600}
    parts = (json.dumps(part).encode() for part in ({"alg": "RS256", "typ": "JWT"}, claims))
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (*parts, b"signature"))


def test_damaged_signatures_are_refused_in_one_line(folder: Path, keys: Keys) -> None:
    sign(folder, Signer(keys.key))
    whole = (folder / SIGNATURE).read_bytes()
    nested = b'{"verificationMaterial": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    damaged = (b"", b"{}", b"[]", whole[:-40], whole.replace(b"dsseEnvelope", b"dsseEnvelopf"), b"\x00" * 100)
    for bad in (*damaged, nested, b'{"verificationMaterial": null}', b'{"verificationMaterial": {}}', b"null"):
        (folder / SIGNATURE).write_bytes(bad)
        with pytest.raises(UntrustedSignature):
            check_signature(folder, keys.public)
        with pytest.raises(UntrustedSignature):
            edgekit.open(folder, require_signature=keys.public)


def test_a_site_must_be_signed_if_keys_are_given(folder: Path, keys: Keys, tmp_path: Path) -> None:
    device, site, app = device_profile(tmp_path), tmp_path / "site", tmp_path / "app"
    with site_server(site) as server:
        options = {"device": device, "allow": ("http",), "keys": keys.public}
        publish([folder], site, release="1")
        with pytest.raises(UntrustedSignature, match=r"index\.json: is not signed"):
            pull(server.url, app, **options)  # type: ignore[arg-type]
        publish([folder], site, release="1", signer=Signer(keys.key))
        with pytest.raises(UntrustedSignature, match="is not signed; sign it and publish it again"):
            pull(server.url, app, **options)  # type: ignore[arg-type]
        sign(folder, Signer(keys.key))
        publish([folder], site, release="1", signer=Signer(keys.other_key))
        with pytest.raises(UntrustedSignature, match="which is not among"):
            pull(server.url, app, **options)  # type: ignore[arg-type]
        publish([folder], site, release="1", signer=Signer(keys.key))
        pulled = pull(server.url, app, **options)  # type: ignore[arg-type]
        assert (pulled.folder / SIGNATURE).exists()
        edgekit.open(app, require_signature=keys.public).close()
        with pytest.raises(InvalidInput, match="its index is signed, and installations that check it would refuse"):
            publish([folder], site, release="2")
        with pytest.raises(InvalidInput, match="its index is signed"):
            withdraw(site, release="1")
        index = site / INDEX
        index.write_bytes(index.read_bytes().replace(b"cpu", b"gpu"))
        with pytest.raises(UntrustedSignature, match=r"index\.json: is not signed"):
            pull(server.url, app, **options)  # type: ignore[arg-type]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
