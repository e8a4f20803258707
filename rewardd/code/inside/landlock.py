"""Landlock (Linux 5.13 and later): which paths the sandboxed program may touch, whatever the mounts say."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from typing import Final

from . import kernel

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
READ_ONLY: Final = _EXECUTE | _READ_FILE | _READ_DIR
DEVICE: Final = _READ_FILE | _WRITE_FILE
TRAVERSE_LINKS: Final = _READ_FILE
_FILE_RIGHTS: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15
_RULE_PATH_BENEATH: Final = 1
_CREATE_VERSION: Final = 1
_BASE_RIGHTS: Final = 13
_BIND_AND_CONNECT_TCP: Final = 3
_SCOPE_ABSTRACT_AND_SIGNAL: Final = 3


def version() -> int:
    """The kernel's landlock ABI, 0 when there is none."""
    try:
        return kernel.call("landlock_create_ruleset", None, ctypes.c_size_t(0), _CREATE_VERSION)
    except OSError:
        return 0


def _handled(abi: int) -> int:
    rights = (1 << _BASE_RIGHTS) - 1
    if abi >= 2:
        rights |= 1 << 13
    if abi >= 3:
        rights |= 1 << 14
    if abi >= 5:
        rights |= 1 << 15
    return rights


def restrict(*, abi: int, read_only: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """Confines the caller for good to these paths; from ABI 4 no TCP, from ABI 6 no abstract sockets or signals
    beyond its own descendants. The caller has set no_new_privs. Paths that do not exist are left out.
    """
    handled = _handled(abi)
    attribute = struct.pack(
        "QQQ", handled, _BIND_AND_CONNECT_TCP if abi >= 4 else 0, _SCOPE_ABSTRACT_AND_SIGNAL if abi >= 6 else 0
    )
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = kernel.call("landlock_create_ruleset", attribute, ctypes.c_size_t(size), 0)
    wanted = [(path, READ_ONLY) for path in read_only] + [(path, handled) for path in writable]
    wanted += [(path, DEVICE) for path in devices]
    for path, rights in wanted:
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights & handled, handle)
        kernel.call("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, rule, 0)
        os.close(handle)
    kernel.call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)
