"""Signatures of artifacts in the format of OpenSSF Model Signing, by the `model-signing` package (extra `sign`).

A signature names every file with its hash. It is `model.sig` in the same folder. Verifying with keys or certificates
uses no network; signatures without a key (Sigstore) do.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from edgekit import Artifact, read_artifact as read_manifest
from edgekit.common.files import write_file
from edgekit.common.machine_facts import is_marked, mark
from edgekit.common.parsing import parse_json, read_bytes
from edgekit.contracts.manifest import MANIFEST, MAX_SIGNATURE_BYTES, SIGNATURE
from edgekit.errors import EdgekitError, InvalidInput, TargetMissing, UntrustedSignature, quote_short

_MAX_PEM_BYTES = 1 << 20
_MOST_KEYS = 100
_MISMATCH = re.compile(r"Hash mismatch for '([^']{1,300})'")
_MISSING = re.compile(r"Missing files in model '[^']*': ([^\]\"]{1,300})")
_EXTRA = re.compile(r"Extra files found in model '[^']*': ([^\]\"]{1,300})")


class Signer(NamedTuple):
    """Signing credentials: a private key and optionally its certificate; without a key, a Sigstore account."""

    key: Path | None = None
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()  # intermediate certificates, between the signer's and the authority's


class KeylessIdentity(NamedTuple):
    """The signer required of a keyless signature: an account and its OpenID Connect provider."""

    identity: str
    provider: str


def sign(path: str | Path, signer: Signer) -> Artifact:
    """Check every byte of an artifact and sign it; an existing signature is replaced."""
    artifact = read_manifest(path)
    artifact.check_hashes()
    write_file(artifact.folder / SIGNATURE, _signed(artifact.folder, signer))
    return artifact


def sign_bytes(name: str, data: bytes, signer: Signer) -> bytes:
    """Return the signature of a file named `name` that holds `data`."""
    with _as_file(name, data) as path:
        return _signed(path, signer)


def check_signature(
    subject: str | Path | Mapping[str, bytes],
    trusted: str | Path | KeylessIdentity,
    *,
    signature: bytes | None = None,
    where: str = "",
    now: datetime | None = None,
) -> str:
    """Check the signature of an artifact, or of a file given as `{name: bytes}`; return a description of the signer.

    `trusted`: a PEM file, or a folder of them, with public keys or certificates of authorities. Raises
    `UntrustedSignature` with the reason.
    """
    _need_package()
    if isinstance(subject, Mapping):
        ((name, data),) = subject.items()
        assert signature is not None
        with _as_file(name, data) as path:
            return _checked(path, signature, trusted, where, now)
    artifact = read_manifest(subject)
    place = artifact.folder / SIGNATURE
    if not place.exists():
        raise UntrustedSignature(f"{artifact.folder}: is not signed; `edgekit sign` signs an artifact")
    return _checked(artifact.folder, read_bytes(place, MAX_SIGNATURE_BYTES), trusted, str(artifact.folder), now)


def check_required_signature(artifact: Artifact, trusted: str | Path | KeylessIdentity) -> None:
    """Check an artifact's signature. For a plain key, success is remembered until the next boot."""
    if isinstance(trusted, KeylessIdentity):
        check_signature(artifact.folder, trusted)
        return
    path = artifact.folder / SIGNATURE
    signature = read_bytes(path, MAX_SIGNATURE_BYTES) if path.exists() else b""
    parts = [artifact.fingerprint().encode(), signature, *(pem for _, pem in _pems(Path(trusted)))]
    seen = {"checked": hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()}
    if not _is_certified(signature) and is_marked(artifact.sha256, "signature", seen):
        return
    check_signature(artifact.folder, trusted)
    mark(artifact.sha256, "signature", seen)


def _need_package() -> None:
    if find_spec("model_signing") is None or find_spec("OpenSSL") is None:
        raise TargetMissing("signatures need the package model-signing; pip install 'edgekit[sign]'")


@contextmanager
def _as_file(name: str, data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="edgekit-signing-") as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


def _signed(path: Path, signer: Signer) -> bytes:
    _need_package()
    from model_signing import hashing, signing

    config = signing.Config()
    if path.is_dir():
        # model-signing takes a relative path as one within the folder.
        ignored = hashing.Config().set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)
        config.set_hashing_config(ignored)
    failed = f"{path}: cannot be signed"
    with tempfile.TemporaryDirectory(prefix="edgekit-signing-") as folder:
        place = Path(folder) / SIGNATURE
        if signer.key is None:
            with _through_sigstore(failed, InvalidInput, "sign with --key where there is none"):
                config.use_sigstore_signer(use_ambient_credentials=True).sign(path, place)
            return place.read_bytes()
        with _words_for(failed):
            if signer.certificate is None:
                config.use_elliptic_key_signer(private_key=signer.key)
            else:
                chain = signer.chain or (signer.certificate,)  # model-signing reads no empty chain
                config.use_certificate_signer(
                    private_key=signer.key, signing_certificate=signer.certificate, certificate_chain=chain
                )
            config.sign(path, place)
        return place.read_bytes()


def _checked(
    path: Path, signature: bytes, trusted: str | Path | KeylessIdentity, where: str, now: datetime | None
) -> str:
    from model_signing import verifying

    material = _material(signature, where)
    config = verifying.Config()
    roots: list[Path] = []
    if isinstance(trusted, KeylessIdentity):
        with _through_sigstore(f"{where}: cannot be verified", UntrustedSignature, "a signature by a key needs none"):
            config.use_sigstore_verifier(identity=trusted.identity, oidc_issuer=trusted.provider)
        who = f"{trusted.identity} ({trusted.provider})"
    elif "publicKey" in material:
        hint = material["publicKey"].get("hint")
        key = next((place for place, pem in _pems(Path(trusted)) if _key_hash(pem) == hint), None)
        if key is None:
            raise UntrustedSignature(f"{where}: is signed with key {_short(hint)}, which is not among {trusted}")
        config.use_elliptic_key_verifier(public_key=key)
        who = f"key {_short(hint)} ({key.name})"
    elif "x509CertificateChain" in material:
        who = _valid_certificate(material, where, now or datetime.now(UTC))
        roots = [place for place, pem in _pems(Path(trusted)) if b"BEGIN CERTIFICATE" in pem]
        if not roots:
            raise UntrustedSignature(
                f"{where}: is signed with the certificate of {who}; {trusted} holds no certificate of an authority"
            )
        config.use_certificate_verifier(certificate_chain=roots)
    else:
        raise UntrustedSignature(
            f"{where}: is signed without a key (Sigstore); give --identity and --identity-provider"
        )
    _verify(config, path, signature, where, who)
    if roots:
        _check_chain(material, roots, where, now or datetime.now(UTC))
    if path.is_dir() and MANIFEST not in _signed_names(signature):
        raise UntrustedSignature(f"{where}: its signature does not cover {MANIFEST}; sign it again")
    return who


def _verify(config: Any, path: Path, signature: bytes, where: str, who: str) -> None:
    """Run model-signing's verifier. Raises `UntrustedSignature` with its reason."""
    from cryptography.exceptions import InvalidSignature
    from OpenSSL.crypto import X509StoreContextError

    with _as_file(SIGNATURE, signature) as place:
        try:
            config.verify(path, place)
        except InvalidSignature as error:
            raise UntrustedSignature(f"{where}: its signature is not by {who}: it was forged or changed") from error
        except X509StoreContextError as error:
            raise UntrustedSignature(
                f"{where}: the certificate of {who} is not from a trusted authority: {error}"
            ) from error
        except EdgekitError:
            raise
        except Exception as error:
            raise UntrustedSignature(f"{where}: {_reason(str(error))}") from error


def _reason(text: str) -> str:
    text = text.replace("\\'", "'")
    changed, missing, extra = _MISMATCH.search(text), _MISSING.search(text), _EXTRA.search(text)
    if changed:
        return f"{changed[1]} is not the file that was signed: it was changed or swapped"
    if missing:
        return f"{missing[1]} was signed and is missing"
    if extra:
        return f"{extra[1]} is there and was not signed"
    return f"its signature cannot be verified: {' '.join(text.split())[:200]}"


def _material(signature: bytes, where: str) -> dict[str, Any]:
    """Return the signature's verification material: a key hint or a certificate chain."""
    try:
        material = parse_json(signature, where)["verificationMaterial"]
        if not isinstance(material, dict):
            raise TypeError("no object")
        if not isinstance(material.get("publicKey", {}), dict):
            raise TypeError("no object")
        return material
    except (InvalidInput, KeyError, TypeError) as error:
        raise UntrustedSignature(f"{where}: its signature is damaged; sign it again") from error


def _signed_names(signature: bytes) -> set[str]:
    """Return the names of the files that a verified signature covers. The manifest among them covers all others."""
    statement = json.loads(b64decode(json.loads(signature)["dsseEnvelope"]["payload"]))
    return {str(each["name"]).partition(":")[0] for each in statement["predicate"]["resources"]}


def _is_certified(signature: bytes) -> bool:
    try:
        return "x509CertificateChain" in _material(signature, "")
    except UntrustedSignature:
        return True


def _valid_certificate(material: Mapping[str, Any], where: str, now: datetime) -> str:
    """Return the certificate's subject. Raises `UntrustedSignature` unless the certificate is valid now.

    model-signing itself checks it only as of the start of its validity period, which always succeeds.
    """
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        data = b64decode(material["x509CertificateChain"]["certificates"][0]["rawBytes"])
        certificate = x509.load_der_x509_certificate(data)
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        name = str(names[0].value) if names else certificate.subject.rfc4514_string()
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UntrustedSignature(f"{where}: the certificate of its signature is damaged; sign it again") from error
    who = quote_short(name)
    if now > certificate.not_valid_after_utc:
        raise UntrustedSignature(
            f"{where}: the certificate of {who} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; sign it with a"
            " new one"
        )
    if now < certificate.not_valid_before_utc:
        raise UntrustedSignature(
            f"{where}: the certificate of {who} is valid from {certificate.not_valid_before_utc:%Y-%m-%d} on"
        )
    return who


def _check_chain(material: Mapping[str, Any], roots: list[Path], where: str, now: datetime) -> None:
    """Raise `UntrustedSignature` unless every certificate up to the authority's is valid now.

    model-signing checks them at the start of the signer's validity period only.
    """
    from cryptography import x509
    from OpenSSL import crypto

    store = crypto.X509Store()
    for place in roots:
        for trusted in x509.load_pem_x509_certificates(place.read_bytes()):
            store.add_cert(crypto.X509.from_cryptography(trusted))
    store.set_time(now)
    chain = [b64decode(each["rawBytes"]) for each in material["x509CertificateChain"]["certificates"]]
    leaf, *others = (crypto.X509.from_cryptography(x509.load_der_x509_certificate(each)) for each in chain)
    try:
        crypto.X509StoreContext(store, leaf, others).verify_certificate()
    except crypto.X509StoreContextError as error:
        name = quote_short(error.certificate.to_cryptography().subject.rfc4514_string())
        raise UntrustedSignature(
            f"{where}: the certificate of {name}, on the way to the authority: {error}; sign it with a valid chain"
        ) from error


def _pems(trusted: Path) -> list[tuple[Path, bytes]]:
    """Read the trusted keys and certificates."""
    paths = sorted(path for path in trusted.iterdir() if path.is_file()) if trusted.is_dir() else [trusted]
    pems = [(path, read_bytes(path, _MAX_PEM_BYTES)) for path in paths[:_MOST_KEYS]]
    pems = [(path, pem) for path, pem in pems if b"BEGIN PUBLIC KEY" in pem or b"BEGIN CERTIFICATE" in pem]
    if not pems:
        raise InvalidInput(f"{trusted}: holds no public key and no certificate in PEM")
    return pems


def _key_hash(pem: bytes) -> str | None:
    """Return the SHA-256 that signatures use as a public key's hint; None for a certificate."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

    if b"BEGIN PUBLIC KEY" not in pem:
        return None
    try:
        key = load_pem_public_key(pem)
    except ValueError as error:
        raise InvalidInput(f"a trusted public key cannot be read: {error}") from error
    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _short(value: object) -> str:
    return str(value)[:16] if isinstance(value, str) and value.isalnum() else quote_short(value, 20)


@contextmanager
def _through_sigstore(what: str, kind: type[EdgekitError], fix: str) -> Iterator[None]:
    """Turn errors of Sigstore's services into `kind`, with the reason and a fix."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise kind(f"{what}: Sigstore did not answer as expected ({reason}); it needs the network: {fix}") from error


@contextmanager
def _words_for(what: str) -> Iterator[None]:
    try:
        yield
    except (EdgekitError, OSError):
        raise
    except Exception as error:
        raise InvalidInput(f"{what}: {' '.join(str(error).split())[:200] or type(error).__name__}") from error
