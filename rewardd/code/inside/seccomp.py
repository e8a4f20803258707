"""The system-call filter of the sandboxed program, assembled by hand (classic BPF, see seccomp(2)).

Everything is allowed but what reaches other processes, the kernel's configuration, namespaces, mounts or the network.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from typing import Final

from . import kernel

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT = 0, 4, 16
_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT: Final = 0x40000000
_SECCOMP_MODE_FILTER: Final = 2
_NAMESPACE_FLAGS: Final = 0x7E020000

_DENIED_X86: Final = {
    "ptrace": 101,
    "syslog": 103,
    "personality": 135,
    "vhangup": 153,
    "modify_ldt": 154,
    "pivot_root": 155,
    "adjtimex": 159,
    "chroot": 161,
    "acct": 163,
    "settimeofday": 164,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "sethostname": 170,
    "setdomainname": 171,
    "iopl": 172,
    "ioperm": 173,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "clock_settime": 227,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "migrate_pages": 256,
    "unshare": 272,
    "move_pages": 279,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "clock_adjtime": 305,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
    "shmget": 29,
    "shmat": 30,
    "semget": 64,
    "msgget": 68,
    "mq_open": 240,
}
_DENIED_ARM: Final = {
    "ptrace": 117,
    "syslog": 116,
    "personality": 92,
    "vhangup": 58,
    "pivot_root": 41,
    "adjtimex": 171,
    "chroot": 51,
    "acct": 89,
    "settimeofday": 170,
    "mount": 40,
    "umount2": 39,
    "swapon": 224,
    "swapoff": 225,
    "reboot": 142,
    "sethostname": 161,
    "setdomainname": 162,
    "init_module": 105,
    "delete_module": 106,
    "quotactl": 60,
    "clock_settime": 112,
    "kexec_load": 104,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "migrate_pages": 238,
    "unshare": 97,
    "move_pages": 239,
    "perf_event_open": 241,
    "fanotify_init": 262,
    "name_to_handle_at": 264,
    "open_by_handle_at": 265,
    "clock_adjtime": 266,
    "setns": 268,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "kcmp": 272,
    "finit_module": 273,
    "kexec_file_load": 294,
    "bpf": 280,
    "userfaultfd": 282,
    "shmget": 194,
    "shmat": 196,
    "semget": 190,
    "msgget": 186,
    "mq_open": 180,
}
_DENIED_COMMON: Final = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
}
_CLONE3: Final = 435
_SOCKET: Final = {"x86_64": 41, "aarch64": 198}


def build() -> bytes:
    """The filter as an array of `struct sock_filter`.

    `clone3` answers ENOSYS (its flags lie in memory, out of the filter's sight; the C library then uses `clone`).
    Sockets other than AF_UNIX are refused; `socketpair`, which asyncio needs, is not.

    Raises:
        OSError: no table for this processor.
    """
    machine = kernel.MACHINE
    if machine not in _ARCH:
        raise OSError(errno.ENOSYS, f"no system-call filter for {machine}")
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 1, 0, _ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        code += [(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    code += [(_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    denied = {**(_DENIED_ARM if machine == "aarch64" else _DENIED_X86), **_DENIED_COMMON}
    for number in denied.values():
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    code += [
        (_JUMP_EQUAL, 0, 4, kernel.NUMBERS["clone"]),
        (_LOAD, 0, 0, _OFFSET_ARGUMENT),
        (_JUMP_SET, 0, 1, _NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_JUMP_EQUAL, 0, 3, _SOCKET[machine]),
        (_LOAD, 0, 0, _OFFSET_ARGUMENT),
        (_JUMP_EQUAL, 1, 0, socket.AF_UNIX),
        (_RETURN, 0, 0, _ERRNO | errno.EACCES),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", operation, true, false, value) for operation, true, false, value in code)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def load(code: bytes) -> None:
    """Loads the filter for good. The caller has set no_new_privs."""
    program = _Program(len(code) // 8, code)
    kernel.prctl(kernel.PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))
