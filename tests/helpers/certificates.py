"""Keys and certificates that tests make: an authority, what it certifies, and a stranger."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra `sign` is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.now(UTC)


class Keys:
    """Two key pairs, and an authority with certificates of the first: one valid, one expired."""

    def __init__(self, folder: Path) -> None:
        self.key, self.public = self._pair(folder, "publisher")
        self.other_key, self.other_public = self._pair(folder, "stranger")
        self.root_key = ec.generate_private_key(ec.SECP256R1())
        self.root = folder / "root.pem"
        self.root.write_bytes(self._certificate("authority", self.root_key, -3650, 3650, is_authority=True))
        key = serialization.load_pem_private_key(self.key.read_bytes(), None)
        self.certificate, self.expired = folder / "valid.pem", folder / "expired.pem"
        self.certificate.write_bytes(self._certificate("publisher", key, -1, 30))
        self.expired.write_bytes(self._certificate("publisher", key, -30, -1))

    def _pair(self, folder: Path, name: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        private, public = folder / f"{name}.pem", folder / f"{name}.pub"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        public.write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        return private, public

    def server(self, folder: Path, host: str, begin: int = -1, end: int = 30) -> Path:
        """Write a PEM file with a new key and the authority's certificate of it for a web server."""
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = folder / f"server-{host}{begin}.pem"
        path.write_bytes(private + self._certificate("server", key, begin, end, hosts=[host]))
        return path

    def chain(self, folder: Path, root: tuple[int, int], middle: tuple[int, int]) -> tuple[Path, Path, Path]:
        """Write an authority, an intermediate and a certificate of the first key, each valid for its days."""
        key = serialization.load_pem_private_key(self.key.read_bytes(), None)
        middle_key = ec.generate_private_key(ec.SECP256R1())
        paths = folder / "long-root.pem", folder / "middle.pem", folder / "leaf.pem"
        paths[0].write_bytes(self._certificate("authority", self.root_key, *root, is_authority=True))
        paths[1].write_bytes(self._certificate("middle", middle_key, *middle, is_authority=True))
        paths[2].write_bytes(self._certificate("publisher", key, -100, 3000, by=("middle", middle_key)))
        return paths

    def _certificate(
        self,
        name: str,
        key: object,
        begin: int,
        end: int,
        *,
        is_authority: bool = False,
        hosts: Sequence[str] = (),
        by: tuple[str, ec.EllipticCurvePrivateKey] | None = None,
    ) -> bytes:
        issuer, issuer_key = by or ("authority", self.root_key)
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
        )
        built = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())  # type: ignore[attr-defined]
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW + timedelta(days=begin))
            .not_valid_after(NOW + timedelta(days=end))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True,
                    key_cert_sign=is_authority,
                    encipher_only=False,
                    decipher_only=False,
                    **usage,
                ),
                critical=True,
            )
        )
        if hosts:
            names = [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
            built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return built.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
