"""How well generation and training overlap, with the demo's real parts: vLLM, reward daemon, coordinator, DeepSpeed.

Four phases, one after another, each with processes of its own:

1. generation alone: no trainer, and a staleness bound that never holds the generator back;
2. the asynchronous run with eta = 1: seconds from one trained batch to the next, the first ones left out;
3. training alone: the coordinator of phase 2 without generators hands out its recorded batches again;
4. the run with eta = 0, with all threads for each side, since only one of them works at a time.

Overlap is perfect when an update of phase 2 takes no longer than the slower of phases 1 and 3, each on the cores it has
in phase 2. The learning rate is next to nothing, so that all phases see answers of the same length.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from deploy.demo.recipe import DemoOptions, prepare_demo
from deploy.local.specs import spec_of
from deploy.status.client import OperatorClient
from protocol.config import Config
from protocol.config.load import EFFECTIVE_NAME, save_effective
from protocol.errors import PeerUnreachable
from protocol.messages import StatusReply

POLL_S = 0.2
WARM_UP = 3
"""Updates left out: the first one compiles kernels, the next ones fill the pipeline."""
DEADLINE_S = 400.0
CALM_CORES = 0.25
ENOUGH = 4
"""Updates in which other processes used more than so many cores are left out of both sides of the comparison, as long
as each side keeps so many."""
NICE = -20
"""Where it is allowed the roles run at this priority, all alike, so that other processes disturb the figures less."""
COMMON = (
    "run.max_updates=100000",
    "learner.optim.lr=1e-12",
    "learner.checkpoint.every_updates=100000",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "transport.heartbeat_s=0.25",
)


@dataclass
class Sample:
    """One look at the run: Unix time, tokens sampled so far by all generators, training slots leased and answered; CPU
    seconds so far of the whole machine and of the roles."""

    time: float
    num_tokens: float
    num_leased: float
    num_answered: float
    machine_s: float
    roles_s: float


@dataclass
class Phase:
    """What a phase showed: records of metrics.jsonl (attempt by attempt) and samples of the status."""

    config: Config
    records: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def periods(self, *, calm: bool) -> dict[int, float]:
        """Seconds from one trained batch to the next, by batch, without the first ones; with `calm` only those that
        other processes hardly disturbed."""
        found = {}
        for before, after in pairwise(self.records):
            begin, end = before["time"], after["time"]
            if after["batch_id"] > WARM_UP and (not calm or self.other_load(begin, end) <= CALM_CORES):
                found[after["batch_id"]] = end - begin
        return found

    def other_load(self, begin: float, end: float) -> float:
        """Cores that everything but the roles used between two times."""
        within = [sample for sample in self.samples if begin <= sample.time <= end]
        if len(within) < 2:
            return 0.0
        first, last = within[0], within[-1]
        used = (last.machine_s - first.machine_s) - (last.roles_s - first.roles_s)
        return max(0.0, used / (last.time - first.time))

    def steady_load(self) -> float:
        """Cores that other processes used in the steady part."""
        return self.other_load(self.records[WARM_UP - 1]["time"], self.records[-1]["time"])


def raise_priority() -> None:
    """In a new session: the benchmark's priority, where that is allowed (Linux may weigh sessions, not processes)."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        Path("/proc/self/autogroup").write_text(str(NICE))


@contextmanager
def roles(config: Config, names: Sequence[str]) -> Iterator[list[psutil.Process]]:
    """The processes of these roles, started as the local supervisor starts them, gone afterwards."""
    run_dir = Path(config.run.dir)
    (run_dir / "logs").mkdir(exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name in names:
            spec = spec_of(config, role=name, index=0, config_path=(run_dir / EFFECTIVE_NAME).resolve())
            with (run_dir / "logs" / f"{spec.name}.log").open("ab") as log:
                for environment in spec.environment():
                    started.append(
                        subprocess.Popen(
                            spec.command,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            env={**os.environ, **environment},
                            start_new_session=True,
                            preexec_fn=raise_priority,
                        )
                    )
        yield [psutil.Process(process.pid) for process in started]
    finally:
        for process in started:  # killed: whatever they would save, nobody needs it
            os.killpg(process.pid, signal.SIGKILL)
        for process in started:
            process.wait()


def watch(phase: Phase, names: Sequence[str], *, until: Callable[[], bool]) -> None:
    """Runs the roles and looks at them until `until()`; raises RuntimeError when one ends or time is up."""
    deadline = time.monotonic() + DEADLINE_S
    metrics = Path(phase.config.run.dir) / "metrics.jsonl"
    with roles(phase.config, names) as processes, OperatorClient(phase.config, deadline_s=60.0) as client:
        while not until():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{', '.join(names)}: not done after {DEADLINE_S:g} s, see {phase.config.run.dir}")
            for process in processes:
                if process.status() == psutil.STATUS_ZOMBIE:
                    raise RuntimeError(f"pid {process.pid} of {', '.join(names)} ended, see {phase.config.run.dir}")
            try:
                phase.samples.append(sample_of(client.status(), processes))
            except (PeerUnreachable, TimeoutError):
                continue
            phase.records = read_records(metrics)
            time.sleep(POLL_S)  # the interval between two looks, not a wait for something


def sample_of(status: StatusReply, processes: Sequence[psutil.Process]) -> Sample:
    """The figures of one status, and where the processor's time went."""
    tokens = sum(role.metrics.get("generator/tokens", 0.0) for role in status.roles if role.role == "generator")
    machine = psutil.cpu_times()
    roles_s = 0.0
    for process in [*processes, *(child for parent in processes for child in parent.children(recursive=True))]:
        with suppress(psutil.NoSuchProcess):
            roles_s += sum(process.cpu_times()[:2])
    return Sample(
        time=time.time(),
        num_tokens=tokens,
        num_leased=status.queues["slots_leased"],
        num_answered=status.queues["slots_answered"],
        machine_s=sum(machine) - machine.idle - machine.iowait,
        roles_s=roles_s,
    )


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of the newest attempt in metrics.jsonl."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    newest = max((record["attempt"] for record in records), default=0)
    return [record for record in records if record["attempt"] == newest]


def configure(folder: Path, name: str, *overrides: str) -> Config:
    """The demo's configuration of one phase, saved where its roles read it."""
    run_dir = folder / name
    run_dir.mkdir(parents=True, exist_ok=True)
    loaded = prepare_demo(DemoOptions(run_dir=run_dir, overrides=(*COMMON, f"run.name={name}", *overrides)))
    save_effective(loaded, run_dir)
    return loaded.config


# ---------------------------------------------------------------- the phases


def generation_alone(folder: Path, *, num_batches: int) -> list[float]:
    """Seconds per batch worth of scored trajectories, batch by batch, after the first."""
    phase = Phase(configure(folder, "generation", f"algorithm.max_staleness={num_batches + 2}"))
    size = phase.config.learner.groups_per_batch * phase.config.learner.group_size

    def done() -> bool:
        return bool(phase.samples) and phase.samples[-1].num_answered >= (num_batches + 1) * size

    watch(phase, ("coordinator", "rewardd", "generator"), until=done)
    times = [crossing(phase.samples, at=(batch + 1) * size) for batch in range(num_batches + 1)]
    return [b - a for a, b in pairwise(times)]


def crossing(samples: Sequence[Sample], *, at: float) -> float:
    """When the number of answers reached `at`, interpolated between two looks."""
    for before, after in pairwise(samples):
        if before.num_answered < at <= after.num_answered:
            share = (at - before.num_answered) / (after.num_answered - before.num_answered)
            return before.time + share * (after.time - before.time)
    raise AssertionError(f"{at} answers were never seen")


def run_of(folder: Path, name: str, *overrides: str, num_updates: int) -> Phase:
    """A whole run until so many updates are trained."""
    phase = Phase(configure(folder, name, *overrides))
    watch(phase, ("coordinator", "rewardd", "trainer", "generator"), until=lambda: len(phase.records) >= num_updates)
    return phase


def training_alone(run: Phase) -> Phase:
    """The run's batches trained again by a fresh trainer, without generators. Nothing is published meanwhile."""
    attempt = run.records[-1]["attempt"]
    phase = Phase(run.config)

    def done() -> bool:
        return len(phase.records) >= len(run.records) and phase.records[-1]["attempt"] > attempt

    watch(phase, ("coordinator", "trainer"), until=done)
    return phase


# ---------------------------------------------------------------- figures


def overlap_fraction(run: Phase) -> tuple[float, float, float]:
    """Of the steady part of a run: share of trainer step time in which tokens were sampled, generators' idle share (no
    lease held), learner's idle share (whatever is not forward, backward and optimizer step).

    Tokens count as sampled between two looks at which their number differs. What changed between two looks counts half.
    """
    steady = [record for record in run.records if record["batch_id"] > WARM_UP]
    begin, end = run.records[WARM_UP - 1]["time"], steady[-1]["time"]
    sampling = [(a.time, b.time) for a, b in pairwise(run.samples) if b.num_tokens > a.num_tokens]
    steps = [(record["time"] - record["perf/update_seconds"], record["time"]) for record in steady]
    step_s = sum(b - a for a, b in steps)
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in sampling for c, d in steps)
    idle = [(a.time, b.time, 1.0 - ((a.num_leased > 0) + (b.num_leased > 0)) / 2) for a, b in pairwise(run.samples)]
    idle_s = sum(share * max(0.0, min(b, end) - max(a, begin)) for a, b, share in idle)
    return both / step_s, idle_s / (end - begin), 1.0 - step_s / (end - begin)


def figure(value: float, unit: str, values: Sequence[float]) -> dict[str, object]:
    return {"value": value, "unit": unit, "spread": [min(values), max(values)], "num_runs": len(values)}


def run(quick: bool = False) -> dict[str, dict[str, object]]:
    """The figures of ``slipstream bench overlap``. ``quick`` measures a third of the updates; the phases stay."""
    num_updates, num_batches, num_eta0 = (8, 4, 6) if quick else (15, 8, 9)
    cores = len(os.sched_getaffinity(0))
    all_threads = (f"trainer.threads_per_rank={cores}", f"generators.threads={cores}", "algorithm.max_staleness=0")
    with tempfile.TemporaryDirectory(prefix="bench-overlap-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        generation = generation_alone(folder, num_batches=num_batches)
        asynchronous = run_of(folder, "asynchronous", num_updates=num_updates)
        alone = training_alone(asynchronous)
        synchronous = run_of(folder, "synchronous", *all_threads, num_updates=num_eta0)
    calm = min(len(phase.periods(calm=True)) for phase in (asynchronous, alone)) >= ENOUGH
    periods, training = asynchronous.periods(calm=calm), alone.periods(calm=calm)
    generation_s, training_s = statistics.median(generation), statistics.median(training.values())
    eta0 = synchronous.periods(calm=False)
    period_s, eta0_s = statistics.median(periods.values()), statistics.median(eta0.values())
    ratios = [max(generation_s, training[batch]) / periods[batch] for batch in training if batch in periods]
    efficiency = max(generation_s, training_s) / period_s
    loads = [asynchronous.steady_load(), alone.steady_load()]
    overlap, generator_idle, learner_idle = overlap_fraction(asynchronous)
    return {
        "overlap_efficiency": figure(efficiency, "ratio", ratios or [efficiency]),
        "time_ratio_eta1_over_eta0": figure(
            period_s / eta0_s, "ratio", [seconds / eta0_s for seconds in periods.values()]
        ),
        "overlap_fraction": figure(overlap, "share", [overlap]),
        "generator_idle_fraction": figure(generator_idle, "share", [generator_idle]),
        "learner_idle_fraction": figure(learner_idle, "share", [learner_idle]),
        "generation_alone_s": figure(generation_s, "s/batch", generation),
        "training_alone_s": figure(training_s, "s/update", list(training.values())),
        "asynchronous_s": figure(period_s, "s/update", list(periods.values())),
        "other_load_cores": figure(max(loads), "cores", loads),
        "eta0_s": figure(eta0_s, "s/update", list(eta0.values())),
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
