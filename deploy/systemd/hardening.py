"""What each role is kept from. rewardd keeps what its sandbox is built from: namespaces, mounts, control groups."""

from collections.abc import Iterator

EVERY_ROLE = (
    ("NoNewPrivileges", "yes"),
    ("ProtectSystem", "strict"),
    ("ProtectHome", "read-only"),
    ("ProtectKernelModules", "yes"),
    ("ProtectClock", "yes"),
    ("RestrictRealtime", "yes"),
    ("RestrictSUIDSGID", "yes"),
    ("LockPersonality", "yes"),
    ("SystemCallArchitectures", "native"),
    ("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6 AF_NETLINK"),
    ("UMask", "0077"),
)

WITHOUT_SANDBOX = (
    ("CapabilityBoundingSet", ""),
    ("AmbientCapabilities", ""),
    ("RestrictNamespaces", "yes"),
    ("ProtectHostname", "yes"),
    ("ProtectKernelTunables", "yes"),
    ("ProtectKernelLogs", "yes"),
    ("ProtectControlGroups", "yes"),
    ("ProtectProc", "invisible"),
    ("SystemCallFilter", "@system-service"),
    ("SystemCallErrorNumber", "EPERM"),
)

NVIDIA = (
    ("DevicePolicy", "closed"),
    ("DeviceAllow", "char-nvidia* rw"),
    ("DeviceAllow", "/dev/shm rw"),
    ("DeviceAllow", "char-infiniband* rw"),
)


def hardening(role: str, *, run_dir: str, has_gpu: bool, private_tmp: bool) -> Iterator[tuple[str, str]]:
    """Options of a role's [Service] section.

    Args:
        run_dir: the only folder it may write to, escaped for a unit file.
        has_gpu: trainer and generators reach the NVIDIA devices.
        private_tmp: a /tmp of its own, gone when it stops.
    """
    yield "PrivateTmp", "yes" if private_tmp else "no"
    yield from EVERY_ROLE
    yield "ReadWritePaths", run_dir if private_tmp else f"{run_dir} /tmp /var/tmp"
    if role == "rewardd":
        return
    yield from WITHOUT_SANDBOX
    if has_gpu and role != "coordinator":
        yield from NVIDIA
    else:
        yield "PrivateDevices", "yes"
