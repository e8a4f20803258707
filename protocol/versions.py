"""Identities that peers compare at their first contact: protocol version, tokenizer hash, incarnation."""

import hashlib
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from protocol.errors import UserError
from protocol.messages import PROTOCOL_VERSION, Hello, Refused, Role


def new_incarnation() -> str:
    """A fresh id of this process start (64 random bits, hexadecimal)."""
    return secrets.token_hex(8)


def tokenizer_hash(folder: str | Path) -> str:
    """First 16 hexadecimal digits of the SHA-256 of `folder`/tokenizer.json.

    Raises:
        UserError: the folder has no tokenizer.json.
    """
    path = Path(folder) / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UserError(
            f"model.tokenizer_path: cannot read {path} ({error.strerror}); name a folder with a fast tokenizer"
        ) from error


def make_hello(
    role: Role,
    *,
    name: str,
    incarnation: str | None = None,
    run_id: str | None = None,
    tokenizer_hash: str | None = None,
    attributes: Mapping[str, str | int | float | bool | list[str]] | None = None,
) -> Hello:
    """The hello of this process, with its host, pid and protocol version filled in."""
    return Hello(
        role=role,
        name=name,
        incarnation=incarnation or new_incarnation(),
        protocol_version=PROTOCOL_VERSION,
        host=socket.gethostname(),
        pid=os.getpid(),
        run_id=run_id,
        tokenizer_hash=tokenizer_hash,
        attributes=dict(attributes or {}),
    )


def check_versions(hello: Hello, *, tokenizer_hash: str | None) -> Refused | None:
    """Refusal, with both values, of a hello that speaks another protocol or uses another tokenizer; else None."""
    if hello.protocol_version != PROTOCOL_VERSION:
        return Refused(
            code="protocol_version",
            reason=f"{hello.role} {hello.name} speaks protocol version {hello.protocol_version}, "
            f"this side speaks {PROTOCOL_VERSION}: install the same release on both",
        )
    if tokenizer_hash and hello.tokenizer_hash and hello.tokenizer_hash != tokenizer_hash:
        return Refused(
            code="tokenizer_hash",
            reason=f"{hello.role} {hello.name} has tokenizer {hello.tokenizer_hash}, this side has {tokenizer_hash}: "
            "use the same model.tokenizer_path contents everywhere",
        )
    return None
