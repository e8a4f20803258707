"""Prometheus endpoint of the coordinator: the run and all roles; a snapshot is taken once a second."""

import time

from learner.coordinator.service import Coordinator
from protocol.endpoint import MetricsServer, Sample, sample, samples
from protocol.messages import RoleStatus, StatusReply
from protocol.metrics import families

INTERVAL_S = 1.0


class MetricsExporter(MetricsServer):
    """Serves the numbers of `status` on `port` (0 = off) of the loopback address."""

    def __init__(self, port: int) -> None:
        super().__init__(port, setting="coordinator.metrics_port")
        self._next = 0.0

    def update(self, coordinator: Coordinator) -> None:
        """Takes a new snapshot when the last one is older than a second."""
        now = time.monotonic()
        if not self.port or now < self._next:
            return
        self._next = now + INTERVAL_S
        self.current = status_samples(coordinator.status())


def status_samples(status: StatusReply) -> list[Sample]:
    """Everything of a status that Prometheus gets; figures that the run and a role both have come from the run."""
    values = {f"queue/{name}": value for name, value in status.queues.items()}
    values |= {f"ledger/{name}": float(value) for name, value in status.ledger.items() if name != "reissued"}
    values |= {f"staleness_tokens/{age}": float(count) for age, count in status.staleness_histogram.items()}
    values |= status.metrics
    values |= {"policy_version": status.policy_version, "published_version": status.published_version}
    values |= {"updates": status.num_updates, "max_updates": status.max_updates, "alarms": len(status.alarms)}
    known = families()
    found = [sample(known["slipstream_run_info"], 1.0, run=status.run_name, state=status.run_state)]
    found += [sample(known["slipstream_alarm"], 1.0, alarm=text.split()[0].rstrip(":")) for text in status.alarms]
    found += samples(values)
    for role in status.roles:
        found += _role_samples(role)
    return found


def _role_samples(role: RoleStatus) -> list[Sample]:
    known = families()
    who = {"role": role.role, "name": role.name}
    found = [
        sample(known["slipstream_role_up"], float(role.state != "gone"), **who),
        sample(known["slipstream_role_version"], float(role.version), **who),
        sample(known["slipstream_role_progress_age_seconds"], role.progress_age_s, **who),
    ]
    if role.state != "gone":
        share = known["slipstream_role_time_share"]
        found += [sample(share, value, **who, cause=cause) for cause, value in role.idle_fractions.items()]
        found += samples(role.metrics, **who)
    return found
