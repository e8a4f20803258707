"""Which CPUs and GPUs each trainer and generator unit is bound to on this machine."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.local.specs import generator_environment
from protocol.config import Config


def consumers(config: Config, *, num_devices: int) -> dict[str, list[int]]:
    """Instance name -> its GPUs, for what computes: the trainer and every generator."""
    trainer = config.trainer
    ranks = list(trainer.devices or range(trainer.num_ranks)) if num_devices and trainer.device != "cpu" else []
    found = {"trainer": ranks}
    for index in range(config.generators.num):
        visible = generator_environment(config, index=index, num_devices=num_devices).get("CUDA_VISIBLE_DEVICES", "")
        found[f"generator-{index}"] = [int(part) for part in visible.split(",") if part]
    return found


def cpu_shares(
    config: Config, *, cpus: Sequence[int], num_devices: int, near: Mapping[int, Sequence[int]]
) -> dict[str, list[int]]:
    """Instance name -> CPUs of its own, evenly among those near the same GPUs; {} where there are too few to divide.

    Args:
        cpus: CPUs this machine lends.
        num_devices: GPUs of this machine.
        near: GPU -> the CPUs of its NUMA node.
    """
    weights = {name: 1 for name in consumers(config, num_devices=num_devices)}
    weights["trainer"] = config.trainer.num_ranks
    if len(cpus) < 2 * sum(weights.values()):
        return {}
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, gpus in consumers(config, num_devices=num_devices).items():
        close = {cpu for gpu in gpus for cpu in near.get(gpu, ())} & set(cpus)
        groups.setdefault(tuple(sorted(close or cpus)), []).append(name)
    shares: dict[str, list[int]] = {}
    for pool, names in groups.items():
        part = len(pool) // sum(weights[name] for name in names)
        start = 0
        for name in names:
            end = start + part * weights[name]
            shares[name] = list(pool[start:end]) if part else list(pool)
            start = end
    return shares


def cpus_near_gpus(root: Path = Path("/")) -> dict[int, list[int]]:
    """GPU index -> CPUs of its NUMA node, as the driver and sysfs tell; {} without NVIDIA GPUs."""
    near: dict[int, list[int]] = {}
    for information in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        minor = [line.split(":")[1] for line in information.read_text().splitlines() if line.startswith("Device Minor")]
        local = root / "sys/bus/pci/devices" / information.parent.name.lower() / "local_cpulist"
        if minor and local.is_file():
            near[int(minor[0])] = parse_cpu_list(local.read_text())
    return near


def parse_cpu_list(text: str) -> list[int]:
    """`0-3,8` -> [0, 1, 2, 3, 8]."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found


def format_cpu_list(cpus: Sequence[int]) -> str:
    """[0, 1, 2, 8] -> `0-2 8`, as CPUAffinity= takes it."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)


def own_cpus() -> list[int]:
    """CPUs this process may use."""
    return sorted(os.sched_getaffinity(0))
