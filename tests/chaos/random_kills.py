"""Random SIGKILLs of a whole run, and losses of power, for longer than the test command has time for.

usage: python -m tests.chaos.random_kills SEED [SECONDS] [NUM_UPDATES]

Prints one JSON line with what was killed; fails when the run does not end as it should (see tests/system/test_kill.py).
"""

import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.support.supervised import SupervisedRun, supervised_run
from tests.system.test_kill import ROLES, assert_ended_well

POWER = "everything"
POWER_FRACTION = 0.12


def kill_at_random(run: SupervisedRun, *, rng: random.Random, seconds: float, num_updates: int) -> Counter[str]:
    """Kills something every few seconds until the time is over or the run is about to end; counts what."""
    kills: Counter[str] = Counter()
    pause, end = threading.Event(), time.monotonic() + seconds
    while time.monotonic() < end:
        pause.wait(rng.uniform(0.3, 6.0))
        assert run.supervisor is not None
        if run.supervisor.poll() is not None or run.num_trained() >= num_updates - 1:
            break
        name = POWER if rng.random() < POWER_FRACTION else rng.choice(ROLES)
        if name == POWER:
            run.lose_power()
            run.up()
            kills[name] += 1
        elif run.role(name).get("state") != "finished":
            with suppress(ProcessLookupError):  # it died of another kill just now
                run.kill(name)
                kills[name] += 1
    return kills


def main() -> int:
    seed = int(sys.argv[1])
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 100.0
    num_updates = int(sys.argv[3]) if len(sys.argv) > 3 else 30
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        supervised_run(Path(folder), run__max_updates=num_updates) as run,
    ):
        kills = kill_at_random(run, rng=random.Random(seed), seconds=seconds, num_updates=num_updates)
        num_trained = run.num_trained()
        run.wait_for_end()
        attempts = run.query("SELECT MAX(attempt) FROM batches")[0][0]
        assert_ended_well(run, num_updates=num_updates, num_attempts=attempts)
    done = {"kills": dict(kills), "trained_under_kills": num_trained, "seconds": round(time.monotonic() - started)}
    print(json.dumps({"seed": seed, **done}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
