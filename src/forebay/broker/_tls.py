"""TLS: a certificate that is given, or one made on the spot for development.

A certificate of one's own making protects against listeners, not against impostors, unless the client is
given it: it is written where a client of the same machine can name it as its authority.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from pathlib import Path

from forebay.errors import Unsupported, UsageError

__all__ = ["self_signed", "server_tls"]

DAYS = 30
"""Days for which a certificate for development is good."""


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """A context for the server; raises `UsageError` where the files are no certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"{certificate} and {key} cannot be used: {error}",
            hint="a certificate chain and its private key, both in PEM, readable by this user",
        ) from error
    return context


def self_signed(folder: Path, host: str) -> tuple[Path, Path]:
    """Make a certificate for this machine; the files of certificate and key."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise Unsupported(
            "a certificate cannot be made here", hint="pip install 'forebay[broker]', or give --tls-cert"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "forebay development")])
    addresses = {ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")}
    names = {"localhost"}
    try:
        addresses.add(ipaddress.ip_address(host))
    except ValueError:
        names.add(host)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(
            x509.SubjectAlternativeName(
                [*map(x509.DNSName, sorted(names)), *(x509.IPAddress(each) for each in addresses)]
            ),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    certificate_file, key_file = folder / "cert.pem", folder / "key.pem"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    key_file.unlink(missing_ok=True)
    with os.fdopen(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    return certificate_file, key_file
