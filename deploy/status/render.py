"""`slipstream status` for a person: tables from a StatusReply and the supervisor's state."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.local.supervisor import describe_exit
from protocol.messages import RoleStatus, StatusReply

BLOCKS = " ▁▂▃▄▅▆▇█"
STATE_STYLES = {"waiting": "yellow", "stopping": "yellow", "stopped": "yellow", "gone": "red"}


def status_view(reply: StatusReply | None, supervisor: Mapping[str, Any] | None, *, why: str = "") -> RenderableType:
    """Everything known of a run; `why` says why the coordinator did not answer."""
    parts: list[RenderableType] = []
    if reply is None:
        parts.append(Text(f"coordinator does not answer: {why}", style="yellow"))
    else:
        parts += [headline(reply), role_table(reply.roles), *figures(reply), *advice(reply)]
    if supervisor is not None:
        parts.append(process_table(supervisor["roles"]))
    return Group(*parts)


def headline(reply: StatusReply) -> Text:
    """One line: run, state, versions, updates."""
    text = Text.assemble(
        (reply.run_name, "bold"),
        f"  {reply.run_state}  update {reply.num_updates}/{reply.max_updates}",
        f"  policy version {reply.policy_version}, published {reply.published_version}",
    )
    for alarm in reply.alarms:
        text.append(f"\nalarm: {alarm}", style="bold red")
    return text


def role_table(roles: Iterable[RoleStatus]) -> Table:
    """One row per role instance: state, version, age of the last progress, what it waits for, idle shares."""
    table = Table(box=None, pad_edge=False)
    for column in ("role", "state", "version", "last progress", "waiting for", "last minute"):
        table.add_column(column)
    for role in roles:
        table.add_row(
            role.name,
            Text(role.state, style=STATE_STYLES.get(role.state, "")),
            str(role.version) if role.version >= 0 else "-",
            f"{age(role.progress_age_s)} ago",
            role.waiting_for or "-",
            shares(role.idle_fractions),
        )
    return table


def shares(fractions: Mapping[str, float]) -> str:
    """Idle shares by cause, largest first: `working 71 %, generation 29 %`."""
    ordered = sorted(fractions.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} {100 * share:.0f} %" for cause, share in ordered if share >= 0.005)


def figures(reply: StatusReply) -> list[RenderableType]:
    """Queues, ledger, staleness and the main metrics, a line each."""
    lines = []
    if reply.staleness_histogram:
        lines.append(f"staleness  {histogram(reply.staleness_histogram)}")
    if reply.queues:
        lines.append("queues     " + ", ".join(f"{name} {value:g}" for name, value in reply.queues.items()))
    if reply.ledger:
        lines.append("slots      " + ", ".join(f"{name} {count}" for name, count in reply.ledger.items()))
    if reply.metrics:
        lines.append("metrics    " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(reply.metrics.items())))
    return [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]


def advice(reply: StatusReply) -> list[RenderableType]:
    """What the figures say about the settings, a line each."""
    return [Text(f"advice     {found.text}", style="cyan") for found in reply.advice]


def histogram(counts: Mapping[str, int]) -> str:
    """Shares of trained tokens by staleness: `0: 62 %  1: 38 %`."""
    total = sum(counts.values()) or 1
    return "  ".join(f"{key}: {100 * count / total:.0f} %" for key, count in sorted(counts.items(), key=_numeric))


def _numeric(item: tuple[str, int]) -> tuple[int, str]:
    return (int(item[0]), "") if item[0].lstrip("-").isdigit() else (10**9, item[0])


def sparkline(values: Iterable[float]) -> str:
    """Values as a row of block characters, scaled to their range."""
    points = list(values)
    if not points:
        return ""
    low, high = min(points), max(points)
    scale = (len(BLOCKS) - 2) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[1 + round((value - low) * scale)] for value in points)


def process_table(roles: Iterable[Mapping[str, Any]]) -> Table:
    """What the supervisor knows: process, uptime, restarts, last exit status."""
    table = Table(box=None, pad_edge=False)
    for column in ("process", "state", "pids", "for", "restarts", "last exit"):
        table.add_column(column)
    for role in roles:
        table.add_row(
            role["name"],
            Text(role["state"], style=STATE_STYLES.get(role["state"], "")),
            " ".join(map(str, role["pids"])) or "-",
            age(time.time() - role["since"]),
            str(role["num_restarts"]),
            describe_exit(role["last_exit"]) if role["last_exit"] is not None else "-",
        )
    return table


def age(seconds: float) -> str:
    """A duration for a person."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
