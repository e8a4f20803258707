"""Driving the demo: prepare, check, start, watch, stop, report."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from deploy.demo.live import make_view
from deploy.demo.recipe import DemoOptions, describe, prepare_demo
from deploy.local.control import read_state, running_state
from deploy.local.launch import prepare_run, start_supervisor, supervise_command
from deploy.local.logfiles import tail
from deploy.local.supervisor import describe_exit
from deploy.report.build import build_report
from deploy.report.records import TIMELINE
from deploy.status.client import OperatorClient
from protocol.config import Config
from protocol.errors import ExitStatus, PeerRefused, PeerUnreachable, UserError
from protocol.messages import StatusReply

REFRESH_S = 1.0
MAX_RESTARTS = 5
STOP_MARGIN_S = 20.0


def run_demo(
    options: DemoOptions, *, console: Console, supervise: Callable[[Path], Sequence[str]] = supervise_command
) -> ExitStatus:
    """Run the whole demo; returns FINISHED only when the report is written.

    Args:
        options: what to run and where.
        console: where progress is shown.
        supervise: command line of the supervisor for a run folder.

    Raises:
        UserError: something is missing or a role keeps failing.
        KeyboardInterrupt: stopped by the user; everything is down by then.
    """
    begin = time.monotonic()
    state = running_state(options.run_dir)
    if state is not None:
        raise UserError(f"{options.run_dir} is in use by the supervisor with pid {state['pid']}")
    console.print("preparing model and data")
    loaded = prepare_demo(options)
    for finding in prepare_run(loaded):
        console.print(str(finding), highlight=False)
    for text in describe(loaded):
        console.print(text, highlight=False, soft_wrap=True)
    run_dir = Path(loaded.config.run.dir)
    with _interruptible():
        process = start_supervisor(run_dir, detach=False, command=supervise(run_dir))
        try:
            peak_gb = _watch(process, loaded.config, run_dir, console=console, begin=begin)
        except BaseException:
            _stop(process, grace_s=loaded.config.deploy.stop_grace_s, console=console)
            raise
    measured = {
        "wall_s": time.monotonic() - begin,
        "peak_rss_gb": peak_gb,
        "num_restarts": {r["name"]: r["num_restarts"] for r in (read_state(run_dir) or {"roles": []})["roles"]},
    }
    report = build_report(run_dir, measured=measured)
    console.print()
    for text in [*report.table_lines(), *report.advice_lines()]:
        console.print(text, highlight=False, soft_wrap=True)
    console.print(f"report   {report.path}", highlight=False, soft_wrap=True)
    return ExitStatus.FINISHED


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM means the same as Ctrl-C while the demo runs."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(process: subprocess.Popen[bytes], config: Config, run_dir: Path, *, console: Console, begin: float) -> float:
    """Show progress until the supervisor ends; returns the largest resident size of all processes together, in GB."""
    peak = 0.0
    poll = StatusPoller(lambda: OperatorClient(config, deadline_s=2.0))
    timeline = run_dir / TIMELINE
    timeline.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(poll), make_view(console) as view, timeline.open("a") as samples:
        while True:
            reply, supervisor = poll.status(), read_state(run_dir)
            rss_gb = resident_gb(process.pid)
            peak = max(peak, rss_gb)
            samples.write(json.dumps(sample(reply, elapsed_s=time.monotonic() - begin, rss_gb=rss_gb)) + "\n")
            view.show(reply, supervisor, elapsed_s=time.monotonic() - begin)
            _give_up_on_failures(supervisor)
            try:
                process.wait(REFRESH_S)
                break
            except subprocess.TimeoutExpired:
                continue
    _check_finished(process.returncode, read_state(run_dir))
    return peak


class StatusPoller:
    """One connection to the coordinator, opened again when it is lost."""

    def __init__(self, connect: Callable[[], OperatorClient]) -> None:
        self._connect = connect
        self._client: OperatorClient | None = None

    def status(self) -> StatusReply | None:
        """The newest status, or None while the coordinator does not answer."""
        try:
            if self._client is None:
                client = self._connect()
                client.__enter__()
                self._client = client
            return self._client.status()
        except (PeerUnreachable, PeerRefused, TimeoutError):
            self.close()
            return None

    def close(self) -> None:
        """Close the connection, if there is one."""
        client, self._client = self._client, None
        if client is not None:
            client.__exit__(None, None, None)


def sample(reply: StatusReply | None, *, elapsed_s: float, rss_gb: float) -> dict[str, Any]:
    """One point of report/timeline.jsonl."""
    point: dict[str, Any] = {"elapsed_s": round(elapsed_s, 2), "rss_gb": round(rss_gb, 3)}
    if reply is not None:
        point |= {"state": reply.run_state, "num_updates": reply.num_updates, "policy_version": reply.policy_version}
        kept = ("generated_tokens_per_s", "idle/trainer", "idle/generators")
        point |= {name: reply.metrics[name] for name in kept if name in reply.metrics}
        point["staleness"] = dict(reply.staleness_histogram)
    return point


def resident_gb(pid: int) -> float:
    """Resident size of a process and all its descendants, in GB (pages they share count once per process)."""
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total / 1e9


def _give_up_on_failures(supervisor: dict[str, Any] | None) -> None:
    for role in supervisor["roles"] if supervisor else []:
        if role["num_restarts"] >= MAX_RESTARTS:
            raise UserError(_failure(role), status=ExitStatus.FAILED)


def _failure(role: dict[str, Any]) -> str:
    lines = tail(Path(role["log"]), num_lines=8)
    return (
        f"{role['name']} failed {role['num_restarts']} times (last exit status {describe_exit(role['last_exit'])}); "
        f"the end of {role['log']}:\n  " + "\n  ".join(lines)
    )


def _check_finished(returncode: int, supervisor: dict[str, Any] | None) -> None:
    roles = supervisor["roles"] if supervisor else []
    unfinished = [r for r in roles if r["role"] in ("coordinator", "trainer") and r["state"] != "finished"]
    if returncode != 0 or not roles or unfinished:
        names = ", ".join(f"{r['name']} {r['state']}" for r in unfinished) or f"supervisor exit status {returncode}"
        raise UserError(f"the run was stopped before it finished ({names})", status=ExitStatus.STOPPED)


def _stop(process: subprocess.Popen[bytes], *, grace_s: float, console: Console) -> None:
    """Orderly stop of everything; a second Ctrl-C kills at once."""
    if process.poll() is not None:
        return
    console.print("stopping all roles (Ctrl-C again kills them)")
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(grace_s + STOP_MARGIN_S)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_MARGIN_S)
