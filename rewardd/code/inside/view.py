"""The file system that the sandboxed program sees: a read-only tmpfs root with the system's software bound in.

The fork server builds it once and makes it its own root, so a test only pays for a fresh `/tmp` and `/proc`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Final

from . import kernel

PACKAGES: Final = "/opt/packages"
WORK: Final = "/tmp"
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM: Final = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
_OLD: Final = "/.old"
_PASSWD: Final = "sandbox:x:{uid}:{uid}:sandbox:/tmp:/bin/sh\n"


def _bind(source: str, target: str) -> None:
    old = _OLD + source
    parent = os.path.dirname(target)
    # Traversable, not listable: the way to an interpreter under /root shows nothing else of /root.
    for depth in range(2, len(parent.split("/")) + 1):
        folder = "/".join(parent.split("/")[:depth])
        if not os.path.isdir(folder):
            os.mkdir(folder)
            os.chmod(folder, 0o711)
    if os.path.isdir(old):
        if not os.path.isdir(target):
            os.mkdir(target)
    else:
        with open(target, "wb"):
            pass
    kernel.mount(old, target, flags=kernel.MS_BIND | kernel.MS_REC)


def _mount_proc() -> bool:
    """Containers that mask parts of /proc forbid a fresh one; the program then does without."""
    try:
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
    except OSError:
        return False
    return True


def build(*, prefix: str, packages: Mapping[str, str], uid: int) -> None:
    """Makes a fresh root of this (own) mount namespace the process's root.

    Args:
        prefix: folder of the interpreter and its standard library, bound at the same path.
        packages: importable name to folder, bound below `/opt/packages`.
        uid: the program's user, for /etc/passwd.

    Raises:
        OSError: any step failed; the namespaces tier is then not to be had.
    """
    kernel.mount(None, "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", WORK, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.mkdir(WORK + _OLD)
    kernel.pivot_root(WORK, WORK + _OLD)
    os.chdir("/")
    os.umask(0o022)
    for folder in ("/tmp", "/proc", "/dev", "/etc", "/opt", PACKAGES):
        os.mkdir(folder)
    for path in _SYSTEM:
        if os.path.islink(_OLD + path):
            os.symlink(os.readlink(_OLD + path), path)
        elif os.path.isdir(_OLD + path):
            _bind(path, path)
    if not prefix.startswith("/usr/") and prefix != "/usr":
        _bind(prefix, prefix)
    for name, folder in packages.items():
        _bind(folder, f"{PACKAGES}/{name}")
    for path in (*DEVICES, "/etc/ld.so.cache"):
        if os.path.exists(_OLD + path):
            _bind(path, path)
    for name, target in (
        ("shm", WORK),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ):
        os.symlink(target, f"/dev/{name}")
    with open("/etc/passwd", "w") as file:
        file.write(_PASSWD.format(uid=uid))
    # A fresh /proc may be mounted inside only where a whole one is visible already.
    with contextlib.suppress(OSError):
        kernel.mount(_OLD + "/proc", "/proc", flags=kernel.MS_BIND | kernel.MS_REC)
    for path in ("/usr", "/lib", "/lib64", "/bin", "/sbin", prefix, *(f"{PACKAGES}/{name}" for name in packages)):
        if os.path.ismount(path):
            kernel.make_read_only(path)
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    kernel.mount(None, "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)


def freshen(*, file_mb: int, uid: int) -> None:
    """In the mount namespace of one test: an empty size-limited /tmp owned by the user, and its own /proc."""
    options = f"size={file_mb}m,nr_inodes=4096,mode=700,uid={uid},gid={uid}"
    kernel.mount("tmpfs", WORK, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    if not _mount_proc():
        kernel.mount("tmpfs", "/proc", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4k,mode=555")
    os.chdir(WORK)
