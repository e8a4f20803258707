"""The units of a run: coordinator, trainer, rewardd@, generator@ and the target that holds them. Pure text.

What every unit keeps to: any end but exit status 0 is restarted with growing delay, for ever; the watchdog is fed by
work; a stop is orderly within deploy.stop_grace_s, then the whole control group is killed; nothing outside the run
folder can be written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.instance import STOP_MARGIN_S
from deploy.local.specs import role_command, trainer_watchdog_s
from deploy.systemd.binding import format_cpu_list
from deploy.systemd.hardening import hardening
from protocol.config import Config

FIRST_WITH_RESTART_STEPS = 254
START_MARGIN_S = 300.0
"""Beyond the deadlines of the configuration: reading a large model from a cold disk."""


@dataclass(frozen=True, kw_only=True)
class UnitSettings:
    """What the units of one machine depend on besides the configuration.

    Attributes:
        config_path: the effective configuration, absolute.
        user: whom the roles run as.
        roles: roles of this machine.
        node_rank: this machine's number among the trainer's.
        systemd_version: keys younger than it are left out.
        environment: more variables of every role.
        cpu_shares: instance name -> CPUs of its own.
        gpus: generator instance name -> its GPUs.
        has_gpu: whether trainer and generators need the NVIDIA devices.
        private_tmp: give every role a /tmp of its own.
    """

    config_path: Path
    user: str
    roles: Sequence[str] = ("coordinator", "rewardd", "trainer", "generator")
    node_rank: int = 0
    systemd_version: int = FIRST_WITH_RESTART_STEPS
    environment: Mapping[str, str] = field(default_factory=dict)
    cpu_shares: Mapping[str, Sequence[int]] = field(default_factory=dict)
    gpus: Mapping[str, Sequence[int]] = field(default_factory=dict)
    has_gpu: bool = False
    private_tmp: bool = True


Section = list[tuple[str, str]]


def render_units(config: Config, settings: UnitSettings) -> dict[str, str]:
    """Relative path -> text of every unit and drop-in."""
    prefix = f"slipstream-{config.run.name}"
    files = {}
    for role in settings.roles:
        files[unit_name(prefix, role)] = _text(
            {
                "Unit": list(_unit(config, settings, role=role, prefix=prefix)),
                "Service": list(_service(config, settings, role=role)),
                "Install": [("WantedBy", f"{prefix}.target")],
            }
        )
    files[f"{prefix}.target"] = _text(
        {
            "Unit": [
                ("Description", f"Slipstream run {config.run.name}"),
                ("Wants", " ".join(instances(config, settings, prefix=prefix))),
            ],
            "Install": [("WantedBy", "multi-user.target")],
        }
    )
    return files | dict(_drop_ins(settings, prefix=prefix))


def unit_name(prefix: str, role: str) -> str:
    """File name of a role's unit; roles of any number are templates."""
    return f"{prefix}-{role}{'@' if role in ('rewardd', 'generator') else ''}.service"


def instances(config: Config, settings: UnitSettings, *, prefix: str) -> list[str]:
    """The services this machine's target wants."""
    counts = {"rewardd": config.rewardd.num, "generator": config.generators.num}
    return [
        name
        for role in settings.roles
        for name in (
            [f"{prefix}-{role}@{index}.service" for index in range(counts[role])]
            if role in counts
            else [f"{prefix}-{role}.service"]
        )
    ]


def _unit(config: Config, settings: UnitSettings, *, role: str, prefix: str) -> Iterator[tuple[str, str]]:
    number = " %i" if role in ("rewardd", "generator") else ""
    yield "Description", f"Slipstream {role}{number} of run {config.run.name}"
    yield "PartOf", f"{prefix}.target"
    yield "StartLimitIntervalSec", "0"
    before = ["network-online.target"]
    if role != "coordinator" and "coordinator" in settings.roles:
        before.append(f"{prefix}-coordinator.service")
    if role in ("trainer", "generator") and "rewardd" in settings.roles:
        before += [f"{prefix}-rewardd@{index}.service" for index in range(config.rewardd.num)]
    yield "After", " ".join(before)
    yield "Wants", "network-online.target"
    yield "RequiresMountsFor", escape(config.run.dir)


def _service(config: Config, settings: UnitSettings, *, role: str) -> Iterator[tuple[str, str]]:
    deploy = config.deploy
    name = f"{role}-%i" if role in ("rewardd", "generator") else role
    command = [escape(part) for part in role_command(role, config_path=settings.config_path, name="NAME")]
    command = [name if part == "NAME" else part for part in command]
    if role == "trainer" and config.trainer.num_nodes > 1:
        command += ["--node-rank", str(settings.node_rank)]
    yield "Type", "notify"
    yield "NotifyAccess", "main"
    yield "ExecStart", " ".join(command)
    yield "User", settings.user
    yield "WorkingDirectory", escape(config.run.dir)
    for key, value in role_environment(config, settings).items():
        yield "Environment", quote(f"{key}={value}")
    watchdog_s = max(deploy.watchdog_s, trainer_watchdog_s(config) if role == "trainer" else 0.0)
    yield "WatchdogSec", f"{watchdog_s:g}" if deploy.watchdog_s else "0"
    yield "TimeoutStartSec", f"{start_deadline_s(config, role):g}"
    yield "TimeoutStopSec", f"{deploy.stop_grace_s + STOP_MARGIN_S:g}"
    yield "TimeoutAbortSec", "15"
    yield "Restart", "always"
    yield "RestartPreventExitStatus", "0"
    yield "SuccessExitStatus", "143"
    yield "RestartSec", f"{deploy.backoff_s:g}"
    if settings.systemd_version >= FIRST_WITH_RESTART_STEPS:
        yield "RestartSteps", "6"
        yield "RestartMaxDelaySec", f"{max(deploy.max_backoff_s, deploy.backoff_s):g}"
    yield "KillMode", "mixed"
    yield "StandardOutput", "journal"
    yield "StandardError", "journal"
    yield "SyslogIdentifier", f"slipstream-{name}"
    yield "LogRateLimitIntervalSec", "30"
    yield "LogRateLimitBurst", "20000"
    yield "MemoryMax", memory_max(config, role)
    if role == "rewardd":
        yield "OOMPolicy", "continue"  # the memory limit of a sandboxed program is that program's end, not the daemon's
        yield "Delegate", "memory pids"
    yield "OOMScoreAdjust", {"coordinator": "-500", "rewardd": "0", "trainer": "100", "generator": "300"}[role]
    yield "LimitNOFILE", "65536"
    yield "LimitCORE", "0"
    if role in ("trainer", "generator"):
        yield "LimitMEMLOCK", "infinity"
    if role == "trainer" and (share := settings.cpu_shares.get("trainer")):
        yield "CPUAffinity", format_cpu_list(share)
    yield from hardening(
        role, run_dir=escape(config.run.dir), has_gpu=settings.has_gpu, private_tmp=settings.private_tmp
    )


def _drop_ins(settings: UnitSettings, *, prefix: str) -> Iterator[tuple[str, str]]:
    """What differs between instances of generator@: its GPUs and CPUs."""
    for name in sorted(settings.gpus.keys() | settings.cpu_shares.keys()):
        role, _, index = name.partition("-")
        if role != "generator" or role not in settings.roles:
            continue
        lines: Section = []
        if settings.gpus.get(name):
            lines.append(("Environment", "CUDA_VISIBLE_DEVICES=" + ",".join(str(gpu) for gpu in settings.gpus[name])))
        if settings.cpu_shares.get(name):
            lines.append(("CPUAffinity", format_cpu_list(settings.cpu_shares[name])))
        if lines:
            yield f"{prefix}-generator@{index}.service.d/binding.conf", _text({"Service": lines})


def role_environment(config: Config, settings: UnitSettings) -> dict[str, str]:
    """Variables of every role: caches lie in the run folder, where they can be written and are found again."""
    cache = Path(config.run.dir) / "cache"
    return {
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        **settings.environment,
    }


def start_deadline_s(config: Config, role: str) -> float:
    """From the start of a process to READY=1."""
    connect_s = config.transport.connect_deadline_s
    own_s = {"generator": config.generators.engine_start_s, "trainer": config.trainer.collective_timeout_s}
    return START_MARGIN_S + connect_s + own_s.get(role, 0.0)


def memory_max(config: Config, role: str) -> str:
    """Hard limit: above the orderly one of the configuration where there is one, else a share of the machine."""
    limits = {
        "trainer": config.trainer.memory_limit_gb * config.trainer.num_ranks,
        "generator": config.generators.memory_limit_gb,
    }
    if limits.get(role):
        return f"{limits[role] * 1.25 * 1000:.0f}M"
    if role == "rewardd":
        code, math = config.rewardd.code, config.rewardd.math
        programs_mb = code.num_workers * code.memory_mb if code.enabled else 0
        return f"{2048 + 1024 * math.num_workers + programs_mb}M"
    return {"coordinator": "25%", "trainer": "90%", "generator": "90%"}[role]


def escape(text: str) -> str:
    """A value as a unit file takes it: % doubled, quoted where it holds spaces."""
    text = text.replace("%", "%%")
    return quote(text) if any(c in text for c in " \t\"'\\") else text


def quote(text: str) -> str:
    """In double quotes, as systemd reads them."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _text(sections: dict[str, Section]) -> str:
    blocks = ["\n".join([f"[{name}]", *(f"{key}={value}" for key, value in lines)]) for name, lines in sections.items()]
    return "\n\n".join(blocks) + "\n"
