"""Which processes a configuration asks for on this machine, and how each is started."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protocol.config import Config
from protocol.config.machine import free_port
from protocol.config.services import DeploySection

ROLES = ("coordinator", "rewardd", "trainer", "generator")
"""In starting order."""

STOP_ORDER = (("generator", "trainer"), ("rewardd",), ("coordinator",))
"""Producers and the learner first, while the coordinator still takes what they hand back."""


def _no_extra_environment() -> list[dict[str, str]]:
    return [{}]


@dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """One role instance: `num_ranks` processes of one command that live and die together.

    `environment()` gives what each rank's environment adds; it is called at each start, so that ports can be fresh.
    `min_watchdog_s`: the role may rightly be silent for this long, whatever deploy.watchdog_s says.
    """

    role: str
    name: str
    command: tuple[str, ...]
    num_ranks: int = 1
    environment: Callable[[], list[dict[str, str]]] = _no_extra_environment
    min_watchdog_s: float = 0.0

    def watchdog_s(self, settings: DeploySection) -> float:
        """Longest silence of this role; 0 = unwatched."""
        return max(settings.watchdog_s, self.min_watchdog_s) if settings.watchdog_s else 0.0


def role_command(role: str, *, config_path: Path, name: str) -> tuple[str, ...]:
    """The command line of one role in the foreground."""
    return (sys.executable, "-m", "deploy", role, "--config", str(config_path), "--name", name)


def specs_of(config: Config, *, config_path: Path, num_devices: int = 0) -> list[RoleSpec]:
    """All role instances of the local supervisor, in starting order.

    Args:
        config: the effective configuration, saved at `config_path`.
        config_path: RUN_DIR/config.yaml, which the roles read.
        num_devices: GPUs of this machine.
    """
    return [
        spec_of(config, role=role, index=index, config_path=config_path, num_devices=num_devices)
        for role, count in (
            ("coordinator", 1),
            ("rewardd", config.rewardd.num),
            ("trainer", 1),
            ("generator", config.generators.num),
        )
        for index in range(count)
    ]


def spec_of(config: Config, *, role: str, index: int, config_path: Path, num_devices: int = 0) -> RoleSpec:
    """The `index`-th instance of a role."""
    name = role if role in ("coordinator", "trainer") else f"{role}-{index}"
    command = role_command(role, config_path=config_path, name=name)
    if role == "trainer":
        return RoleSpec(
            role=role,
            name=name,
            command=command,
            num_ranks=config.trainer.num_ranks,
            environment=lambda: trainer_environment(config),
            min_watchdog_s=trainer_watchdog_s(config),
        )
    if role == "generator":
        return RoleSpec(
            role=role,
            name=name,
            command=command,
            environment=lambda: [generator_environment(config, index=index, num_devices=num_devices)],
        )
    return RoleSpec(role=role, name=name, command=command)


def trainer_watchdog_s(config: Config) -> float:
    """How long a trainer may rightly be silent: two waits for a batch."""
    return 2 * (config.trainer.batch_wait_s + config.transport.request_deadline_s)


def trainer_environment(config: Config, *, node_rank: int = 0) -> list[dict[str, str]]:
    """Environment of each trainer rank of one machine, as torchrun would set it.

    On one machine the rendezvous port is a fresh one per start, unless trainer.master_port names it.
    """
    trainer = config.trainer
    ranks, port = trainer.num_ranks, trainer.master_port or free_port()
    threads = {"OMP_NUM_THREADS": str(config.trainer.threads_per_rank)} if config.trainer.threads_per_rank else {}
    return [
        {
            "RANK": str(node_rank * ranks + rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(trainer.num_nodes * ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": trainer.master_addr,
            "MASTER_PORT": str(port),
            **threads,
        }
        for rank in range(ranks)
    ]


def generator_environment(config: Config, *, index: int, num_devices: int) -> dict[str, str]:
    """The GPUs of one generator: those configured, else the ones after the trainer's (shared when there are none)."""
    if config.generators.device == "cpu" or not num_devices:
        return {}
    size = config.generators.tensor_parallel_size
    if config.generators.devices:
        chosen = config.generators.devices[index * size : (index + 1) * size]
    else:
        first = config.trainer.num_ranks if config.trainer.num_ranks + size <= num_devices else 0
        span = max(1, (num_devices - first) // size)
        start = first + index % span * size
        chosen = list(range(start, start + size))
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(device) for device in chosen)}


def num_gpus() -> int:
    """GPUs of this machine, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip()])
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
