"""Preparing a run folder and starting its supervisor."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.local.control import read_state, running_state
from deploy.local.instance import die_with_parent
from deploy.local.logfiles import tail
from deploy.local.specs import num_gpus, spec_of, specs_of
from deploy.local.supervisor import Supervisor
from learner.sinks.load import check_sinks
from protocol.config.checks import Finding, check_config, raise_on_errors
from protocol.config.load import EFFECTIVE_NAME, Loaded, save_effective
from protocol.config.machine import check_machine
from protocol.errors import ExitStatus, UserError
from protocol.logs import setup_logging

START_DEADLINE_S = 20.0
_POLL_S = 0.05
SUPERVISOR_LOG = Path("logs") / "supervisor.log"


def prepare_run(loaded: Loaded) -> list[Finding]:
    """Run all checks and save the effective configuration; returns the warnings.

    Raises:
        UserError: something cannot work.
    """
    findings = [*check_config(loaded), *check_machine(loaded.config), *check_sinks(loaded.config)]
    raise_on_errors(findings)
    save_effective(loaded, loaded.config.run.dir)
    return findings


def supervise(run_dir: Path, *, loaded: Loaded) -> ExitStatus:
    """Run the supervisor of a prepared run folder in this process until all is over."""
    setup_logging("supervisor", loaded.config.run.name)
    path = (run_dir / EFFECTIVE_NAME).resolve()
    gpus = num_gpus()
    supervisor = Supervisor(
        run_dir,
        specs_of(loaded.config, config_path=path, num_devices=gpus),
        settings=loaded.config.deploy,
        make_spec=lambda role, index: spec_of(
            loaded.config, role=role, index=index, config_path=path, num_devices=gpus
        ),
    )
    return supervisor.run()


def supervise_command(run_dir: Path) -> list[str]:
    """The command line of the supervisor of a prepared run folder."""
    return [sys.executable, "-m", "deploy", "supervise", str(run_dir)]


def start_supervisor(run_dir: Path, *, detach: bool, command: Sequence[str] | None = None) -> subprocess.Popen[bytes]:
    """Start `slipstream supervise RUN_DIR` in a session of its own and wait until it has written its state.

    Args:
        run_dir: a prepared run folder.
        detach: let it outlive this process; else it stops everything when this process dies.
        command: in place of `supervise_command`.

    Raises:
        UserError: it ended at once, or said nothing within 20 s.
    """
    log_path = run_dir / SUPERVISOR_LOG
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command or supervise_command(run_dir),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=None if detach else die_with_parent,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        if _has_state(process, run_dir):
            if detach:
                process.returncode = 0  # not waited for: it outlives this process
            return process
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    process.kill()
    raise UserError(
        f"the supervisor did not start: {' / '.join(tail(log_path, num_lines=3))} (see {log_path})",
        status=ExitStatus.FAILED,
    )


def _has_state(process: subprocess.Popen[bytes], run_dir: Path) -> bool:
    """Wait until the supervisor has written its state; False when it ended or the deadline passed first."""
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        state = read_state(run_dir)
        if state is not None and state["pid"] == process.pid:
            return True
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
        return False
    return False


def wait_until_gone(run_dir: Path, *, deadline_s: float) -> bool:
    """Wait until no supervisor is alive for the run; False when the deadline passed first."""
    state = running_state(run_dir)
    if state is None:
        return True
    try:
        fd = os.pidfd_open(state["pid"])
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], deadline_s)[0])
    finally:
        os.close(fd)
