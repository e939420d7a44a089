"""Keys and certificates of a cluster, by openssl. Nothing here is used twice: they last 30 days."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sluice_cluster.shell import run

DAYS = "30"


@dataclass(frozen=True, slots=True)
class Identity:
    """One certificate: its name, its groups, and the addresses at which it serves."""

    file: str
    name: str
    groups: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        return "".join(f"/O={group}" for group in self.groups) + f"/CN={self.name}"

    @property
    def extensions(self) -> str:
        """openssl's extension file. Every certificate may be a client's; some serve too."""
        lines = ["basicConstraints=CA:FALSE", "keyUsage=digitalSignature"]
        lines.append("extendedKeyUsage=clientAuth" + (",serverAuth" if self.addresses else ""))
        if self.addresses:
            lines.append("subjectAltName=" + ",".join(map(_alternative, self.addresses)))
        return "\n".join(lines) + "\n"


def _alternative(address: str) -> str:
    return ("IP:" if address.replace(".", "").isdigit() else "DNS:") + address


@dataclass(frozen=True, slots=True)
class Authority:
    """A folder with a certificate authority and the certificates that it signed."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def service_account_key(self) -> Path:
        return self.folder / "service-account.key"

    def cert(self, file: str) -> Path:
        return self.folder / f"{file}.crt"

    def key(self, file: str) -> Path:
        return self.folder / f"{file}.key"


def create(folder: Path, identities: Iterable[Identity]) -> Authority:
    """A new authority in `folder`, with one certificate for each of `identities`."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    authority = Authority(folder)
    _new_key(authority.key("ca"))
    _new_key(authority.service_account_key)
    run(
        ["openssl", "req", "-x509", "-new", "-sha256", "-days", DAYS, "-subj", "/CN=sluice-ca",
         "-key", authority.key("ca"), "-out", authority.certificate]
    )  # fmt: skip
    for identity in identities:
        _sign(authority, identity)
    return authority


def _sign(authority: Authority, identity: Identity) -> None:
    request = authority.folder / f"{identity.file}.csr"
    extensions = authority.folder / f"{identity.file}.ext"
    extensions.write_text(identity.extensions)
    _new_key(authority.key(identity.file))
    run(
        ["openssl", "req", "-new", "-sha256", "-subj", identity.subject,
         "-key", authority.key(identity.file), "-out", request]
    )  # fmt: skip
    run(
        ["openssl", "x509", "-req", "-sha256", "-days", DAYS, "-in", request, "-CAcreateserial",
         "-CA", authority.certificate, "-CAkey", authority.key("ca"),
         "-extfile", extensions, "-out", authority.cert(identity.file)]
    )  # fmt: skip
    request.unlink()
    extensions.unlink()


def _new_key(path: Path) -> None:
    command = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout"]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as handle:
        handle.write(run(command))
