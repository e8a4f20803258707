"""Real coordinator, reward daemons and generators (scripted back end), a trainer, and no mercy.

Every few seconds one fault is drawn from a seed: a role is killed, stopped by a signal for a while, told to leave; or
the network in front of the coordinator loses, doubles, delays or holds messages, or cuts every connection. Roles that
end are started again, as a supervisor would. Afterwards everything is left in peace, has to train on, and is stopped;
the report says what was lost, doubled or waited for too long.
"""

import json
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import monotonic

from deploy.local.specs import role_command
from deploy.soak.crew import Crew, Member
from deploy.soak.faults import Faults
from deploy.soak.measure import Sample, take
from deploy.soak.report import Report
from deploy.soak.setup import coordinator_port, write_run
from deploy.soak.toxic import ToxicProxy
from deploy.soak.trainer import surviving
from deploy.status.client import OperatorClient
from protocol.config.load import EFFECTIVE_NAME
from protocol.errors import ExitStatus, UserError
from protocol.messages import ControlRequest

TURN_S = 0.1
START_S = 90.0
MAX_GAP_S = 60.0
"""Longest time without a trained batch, whatever goes on; longer is an overrun."""
PEACE_BATCHES = 3
NUM_REWARDD, NUM_GENERATORS = 2, 3
ORDERLY = {int(ExitStatus.FINISHED), int(ExitStatus.STOPPED)}
KNOWN_ENDS = ORDERLY | {int(ExitStatus.CONFIG), int(ExitStatus.LOST_DEPENDENCY)}
"""Exit statuses a role may choose in such weather: finished, stopped, refused by its server, lost dependency."""


class Soak:
    """One experiment in an empty `folder`; `run` is its life.

    Args:
        mean_pause_s: mean time between faults.
        rate: tokens per second of each scripted request; sets how much the machine has to do.
        sample_s: interval of looks at memory, descriptors and threads.
        on_progress: told one line now and then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        mean_pause_s: float = 1.5,
        rate: float = 200.0,
        sample_s: float = 1.0,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.report = Report()
        self._samples: list[Sample] = []
        self._mean_pause_s, self._sample_s = mean_pause_s, sample_s
        self._on_progress = on_progress
        self._pause = threading.Event()
        port = coordinator_port()
        self._proxy = ToxicProxy(port, seed=seed)
        self._config = write_run(
            folder, advertise=self._proxy.address, listen=f"tcp://127.0.0.1:{port}", seed=seed, rate=rate
        )
        self._crew = Crew(folder / "logs", seed=seed, on_end=self._on_end)
        longest_s = 2.0 * self._config.transport.peer_timeout_s
        self._faults = Faults(self._crew, self._proxy, seed=seed, longest_s=longest_s)
        run_dir = Path(self._config.run.dir)
        self._config_path = run_dir / EFFECTIVE_NAME
        self._ledger = run_dir / "coordinator" / "ledger.sqlite"
        self._trainer = folder / "trainer"
        self._trainer.mkdir()
        self._lineage = self._trainer / "lineage.jsonl"
        self._lineage.touch()
        self._samples_file = (folder / "samples.jsonl").open("a", buffering=1)

    def run(self, seconds: float) -> Report:
        """Chaos for `seconds`, then peace, then an orderly stop; all processes are gone afterwards."""
        try:
            self._start()
            begun = monotonic()
            self._wait_for_batches(1, deadline_s=START_S, what="the first batch")
            self._torment(seconds)
            self._make_peace()
            self.report.minutes = round((monotonic() - begun) / 60.0, 2)
            self._stop()
        finally:
            self.close()
        self._judge()
        return self.report

    def close(self) -> None:
        """Ends everything this soak started."""
        self._crew.close()
        self._proxy.close()
        self._samples_file.close()

    def _start(self) -> None:
        names = {
            "coordinator": ["coordinator"],
            "rewardd": [f"rewardd-{i}" for i in range(NUM_REWARDD)],
            "generator": [f"generator-{i}" for i in range(NUM_GENERATORS)],
        }
        for role, members in names.items():
            for name in members:
                self._crew.start(name, role_command(role, config_path=self._config_path, name=name))
        stand_in = [sys.executable, "-m", "deploy.soak.trainer", str(self._config_path), str(self._trainer)]
        self._crew.start("trainer", stand_in)

    # ------------------------------------------------------------ the chaos

    def _torment(self, seconds: float) -> None:
        begun = monotonic()
        next_fault = next_sample = begun
        next_line = begun + 60.0
        seen, seen_at = self._progress(), begun
        while (now := monotonic()) < begun + seconds:
            if now >= next_fault:
                self._faults.strike()
                next_fault = now + self._faults.pause_s(self._mean_pause_s)
            if now >= next_sample:
                self._sample()
                next_sample = now + self._sample_s
            if now >= next_line:
                counts = ", ".join(f"{n} {name}" for name, n in sorted(self._faults.counts.items()))
                self._on_progress(f"{(now - begun) / 60:.0f} min: {len(surviving(self._lineage))} batches; {counts}")
                next_line = now + 60.0
            self._tend()
            if (size := self._progress()) != seen:
                seen, seen_at = size, now
            elif now - seen_at > MAX_GAP_S:
                self.report.overrun(f"no batch was trained for {now - seen_at:.0f} s")
                seen_at = now
            self._pause.wait(TURN_S)

    def _tend(self) -> None:
        self._faults.tend()
        self._crew.tend()

    def _progress(self) -> int:
        return self._lineage.stat().st_size

    def _on_end(self, member: Member, status: int) -> None:
        by_signal = status == -signal.SIGTERM or (member.was_killed and status == -signal.SIGKILL)
        if not by_signal and status not in KNOWN_ENDS:
            self.report.crashes.append(f"{member.name} ended with status {status}")
        if member.name == "coordinator" and self._ledger.exists():
            self.report.check_ledger(self._ledger, "after the coordinator ended")

    def _sample(self) -> None:
        for member in self._crew.members.values():
            if member.is_up:
                sample = take(member.name, member.process.pid, age_s=monotonic() - member.started)
                if sample is not None:
                    self._samples.append(sample)
                    self._samples_file.write(json.dumps(asdict(sample)) + "\n")

    # ------------------------------------------------------------ the end

    def _make_peace(self) -> None:
        self._faults.heal()
        self._crew.wake_all()
        done = len(surviving(self._lineage))
        self._wait_for_batches(done + PEACE_BATCHES, deadline_s=MAX_GAP_S, what="training after the chaos")

    def _wait_for_batches(self, num: int, *, deadline_s: float, what: str) -> None:
        end = monotonic() + deadline_s
        while len(surviving(self._lineage)) < num:
            if monotonic() > end:
                self.report.overrun(f"{what}: not within {deadline_s:g} s")
                return
            self._tend()
            self._pause.wait(0.25)

    def _stop(self) -> None:
        """As an operator: `stop`, and every role has to leave by itself within the grace time."""
        try:
            with OperatorClient(self._config, deadline_s=20.0) as client:
                client.control(ControlRequest(command="stop"))
        except (UserError, TimeoutError) as error:
            self.report.overrun(f"the coordinator does not take a stop: {error}")
        for name, status in self._crew.wait(deadline_s=2 * self._config.deploy.stop_grace_s).items():
            if status is None:
                self.report.overrun(f"{name} did not leave in time after stop")
            elif status not in ORDERLY:
                self.report.crashes.append(f"{name} ended with status {status} after stop")

    def _judge(self) -> None:
        report, counts = self.report, self._faults.counts
        report.check_ledger(self._ledger, "at the end")
        report.check_lineage(self._ledger, surviving(self._lineage))
        overruns = self._trainer / "overruns.jsonl"
        for line in overruns.read_text().splitlines() if overruns.exists() else []:
            report.overrun(f"a wait of the trainer: {json.loads(line)}")
        report.kills, report.freezes, report.stops = counts["kills"], counts["freezes"], counts["stops"]
        report.delays = counts["slow spells"] + counts["stalls"] + counts["cuts"]
        report.drops, report.duplicates = self._proxy.num_dropped, self._proxy.num_duplicated
        report.restarts = self._crew.num_restarts
        report.check_growth(self._samples)
