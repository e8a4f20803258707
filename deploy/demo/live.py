"""The demo's view while it runs: a refreshing panel on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.status.render import age, histogram, process_table, role_table, sparkline
from protocol.messages import StatusReply

LINE_EVERY_S = 30.0


class View(Protocol):
    """Shows the newest state of the demo."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, reply: StatusReply | None, supervisor: Mapping[str, Any] | None, *, elapsed_s: float) -> None: ...


def make_view(console: Console) -> View:
    """A live panel when the console is a terminal, else plain lines."""
    return LiveView(console) if console.is_terminal else LineView(console)


class LiveView:
    """A panel that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, reply: StatusReply | None, supervisor: Mapping[str, Any] | None, *, elapsed_s: float) -> None:
        """Redraw."""
        self._live.update(panel(reply, supervisor, elapsed_s=elapsed_s))


class LineView:
    """One line per update and per change of state, and at least one every 30 s."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[object, ...] = ()
        self._last = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, reply: StatusReply | None, supervisor: Mapping[str, Any] | None, *, elapsed_s: float) -> None:
        """Print a line when there is something new to say."""
        restarts = sum(role["num_restarts"] for role in supervisor["roles"]) if supervisor else 0
        key = (reply.run_state, reply.num_updates, restarts) if reply else (None, 0, restarts)
        now = time.monotonic()
        if key != self._shown or now - self._last >= LINE_EVERY_S:
            self._shown, self._last = key, now
            self._console.print(line(reply, supervisor, elapsed_s=elapsed_s), highlight=False, soft_wrap=True)


def line(reply: StatusReply | None, supervisor: Mapping[str, Any] | None, *, elapsed_s: float) -> str:
    """The state of the demo in one line."""
    parts = [f"{elapsed_s:6.0f} s"]
    if reply is None:
        parts.append(without_coordinator(supervisor))
    else:
        metrics = reply.metrics
        parts += [reply.run_state, f"update {reply.num_updates}/{reply.max_updates}", f"version {reply.policy_version}"]
        if "rollout/reward_mean" in metrics:
            parts.append(f"reward {metrics['rollout/reward_mean']:.3f}")
        parts.append(f"{metrics.get('generated_tokens_per_s', 0.0):.0f} tokens/s")
        parts += [f"{name} idle {100 * share:.0f} %" for name, share in idle_shares(reply).items()]
        waiting = [f"{role.name} waits for {role.waiting_for}" for role in reply.roles if role.waiting_for]
        parts += waiting if not reply.num_updates else []
    if supervisor:
        parts += [f"{r['name']} restarted {r['num_restarts']} times" for r in supervisor["roles"] if r["num_restarts"]]
    return "  ".join(parts)


def without_coordinator(supervisor: Mapping[str, Any] | None) -> str:
    """What goes on while the coordinator does not answer."""
    roles = supervisor["roles"] if supervisor else []
    running = ", ".join(role["name"] for role in roles if role["state"] == "running") or "nothing runs"
    if any(role["state"] == "finished" for role in roles):
        return f"ending ({running})"
    return f"starting ({running})"


def idle_shares(reply: StatusReply) -> dict[str, float]:
    """Share of the last minute that learner and generators spent idle, by name."""
    names = {"idle/trainer": "learner", "idle/generators": "generators"}
    return {name: reply.metrics[key] for key, name in names.items() if key in reply.metrics}


def panel(reply: StatusReply | None, supervisor: Mapping[str, Any] | None, *, elapsed_s: float) -> Panel:
    """Everything at a glance."""
    parts: list[RenderableType] = []
    if reply is None:
        parts.append(Text(without_coordinator(supervisor), style="yellow"))
        if supervisor:
            parts.append(process_table(supervisor["roles"]))
    else:
        parts += [_progress(reply, elapsed_s), _figures(reply), role_table(reply.roles)]
        parts += [Text(f"alarm: {alarm}", style="bold red") for alarm in reply.alarms]
        restarted = [role for role in supervisor["roles"] if role["num_restarts"]] if supervisor else []
        if restarted:
            parts.append(process_table(restarted))
    return Panel(Group(*parts), title="slipstream demo", title_align="left", subtitle="Ctrl-C stops everything")


def _progress(reply: StatusReply, elapsed_s: float) -> Table:
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, reply.max_updates), completed=reply.num_updates, width=40)
    grid.add_row(
        Text(reply.run_state, style="bold"), bar, f"update {reply.num_updates}/{reply.max_updates}", age(elapsed_s)
    )
    return grid


def _figures(reply: StatusReply) -> Table:
    grid = Table.grid(padding=(0, 2))
    metrics = reply.metrics
    rewards = reply.series.get("rollout/reward_mean", [])
    if rewards:
        grid.add_row("mean reward", f"{rewards[-1]:.3f}", sparkline(rewards[-40:]))
    grid.add_row("policy version", str(reply.policy_version), f"published {reply.published_version}")
    grid.add_row("generated", f"{metrics.get('generated_tokens_per_s', 0.0):.0f} tokens/s", _lengths(metrics))
    if reply.staleness_histogram:
        grid.add_row("staleness of tokens", "", histogram(reply.staleness_histogram))
    shares = "  ".join(f"{name} {100 * share:.0f} %" for name, share in idle_shares(reply).items())
    grid.add_row("idle, last minute", "", shares or "-")
    return grid


def _lengths(metrics: Mapping[str, float]) -> str:
    if "rollout/response_tokens_mean" not in metrics:
        return ""
    cut = 100 * metrics.get("rollout/truncated_fraction", 0.0)
    return f"{metrics['rollout/response_tokens_mean']:.1f} tokens per answer, {cut:.0f} % cut"
