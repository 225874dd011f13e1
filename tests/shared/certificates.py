"""Certificates for tests of TLS."""

import ipaddress
from datetime import UTC, datetime

import pytest


def certificate(folder):
    """Return a file with an untrusted certificate for 127.0.0.1 and its key."""
    x509 = pytest.importorskip("cryptography.x509", reason="cryptography comes with what tests S3")
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime(2020, 1, 1, tzinfo=UTC)).not_valid_after(
        datetime(2099, 1, 1, tzinfo=UTC)
    )
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "both.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(*plain))
    return path
