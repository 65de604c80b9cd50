"""Certificates of the server and keys of the nodes. Needs `cryptography`, which comes with the extra `flower`."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

CURVE = ec.SECP384R1()  # the one that Flower documents for SuperNodes
_SIGNS = x509.KeyUsage(
    **dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False),
    **dict.fromkeys(("encipher_only", "decipher_only"), False),
    **dict.fromkeys(("digital_signature", "key_cert_sign", "crl_sign"), True),
)
EARLIER = datetime.timedelta(hours=1)  # clocks of devices may be slow


def authority(folder: Path, days: int) -> None:
    """Write ca.crt and ca.key: an authority of this federation alone."""
    key = ec.generate_private_key(CURVE)
    name = _name("hetperm federation")
    certificate = (
        _begun(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_SIGNS, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    _write_private(folder / "ca.key", key)
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def server_certificate(folder: Path, authority_folder: Path, hosts: Sequence[str], days: int) -> None:
    """Write server.pem and server.key, signed by the authority, for these names and addresses."""
    ca = x509.load_pem_x509_certificate((authority_folder / "ca.crt").read_bytes())
    ca_key = serialization.load_pem_private_key((authority_folder / "ca.key").read_bytes(), None)
    key = ec.generate_private_key(CURVE)
    certificate = (
        _begun(_name("hetperm server"), ca.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    _write_private(folder / "server.key", key)
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def node_key(private: Path, public: Path) -> None:
    """Write the private and the public key of a node."""
    key = ec.generate_private_key(CURVE)
    _write_private(private, key, serialization.PrivateFormat.OpenSSH)
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - EARLIER)
        .not_valid_after(end)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_private(
    path: Path,
    key: ec.EllipticCurvePrivateKey,
    form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8,
) -> None:
    """Write a private key that only its owner may read, from the first moment on."""
    content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
