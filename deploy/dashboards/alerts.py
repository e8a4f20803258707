"""Alert rules for Prometheus: what somebody should look at, and where the answer is."""

from dataclasses import dataclass
from typing import Any, Literal

from deploy.dashboards.queries import JOB, scoped

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True)
class Alert:
    """One rule. `expr` has no job selector; `summary` may use Prometheus's templates."""

    name: str
    expr: str
    hold: str
    severity: Severity
    summary: str
    action: str


ALERTS = (
    Alert(
        "SlipstreamCoordinatorDown", "up == 0", "2m", "critical",
        "The coordinator at {{ $labels.instance }} does not answer", "its log; it must be restarted by its supervisor",
    ),
    Alert(
        "SlipstreamRoleDown", "sum by (instance, role) (slipstream_role_up) == 0", "5m", "critical",
        "No {{ $labels.role }} is alive", "its log and exit status: slipstream status",
    ),
    Alert(
        "SlipstreamNoProgress",
        'changes(slipstream_updates[1h]) == 0 and on (instance) slipstream_run_info{state="running"} == 1',
        "30m", "critical", "No batch was trained for an hour and a half",
        "slipstream status: what the trainer waits for",
    ),
    Alert(
        "SlipstreamPaused", 'slipstream_run_info{state="paused"} == 1', "5m", "critical",
        "The run {{ $labels.run }} is paused", "slipstream status says by whom and why",
    ),
    Alert(
        "SlipstreamAlarm", "slipstream_alarm == 1", "1m", "critical",
        "Alarm of the run: {{ $labels.alarm }}", "docs/operations.md, By symptom",
    ),
    Alert(
        "SlipstreamLearnerStarved", "slipstream_idle_trainer > 0.5", "30m", "warning",
        "The trainer waits {{ $value | humanizePercentage }} of its time", "docs/tuning.md: more generators",
    ),
    Alert(
        "SlipstreamGeneratorsIdle", "slipstream_idle_generators > 0.5", "30m", "warning",
        "Generators wait {{ $value | humanizePercentage }} of their time", "docs/tuning.md: fewer generators",
    ),
    Alert(
        "SlipstreamStaleTokens",
        "increase(slipstream_stale_tokens_total[1h]) / "
        "(increase(slipstream_stale_tokens_total[1h]) + increase(slipstream_trained_tokens_total[1h])) > 0.05",
        "10m", "warning", "{{ $value | humanizePercentage }} of the tokens are too old to be trained",
        "docs/tuning.md: staleness",
    ),
    Alert(
        "SlipstreamSkippedUpdates", "increase(slipstream_skipped_updates_total[1h]) > 2", "0m", "warning",
        "{{ $value | humanize }} batches of the last hour had no finite update", "lower learner.optim.lr",
    ),
    Alert(
        "SlipstreamEffectiveSampleSizeLow", "slipstream_importance_ess < 0.3", "30m", "warning",
        "Effective sample size is {{ $value | humanizePercentage }}", "docs/tuning.md: off-policy correction",
    ),
    Alert(
        "SlipstreamUnjudged",
        'sum by (instance) (increase(slipstream_verdicts_by_verdict_total{verdict="unjudged"}[30m])) / '
        "sum by (instance) (increase(slipstream_verdicts_by_verdict_total[30m])) > 0.05",
        "10m", "warning", "{{ $value | humanizePercentage }} of the answers cannot be judged", "the log of rewardd",
    ),
    Alert(
        "SlipstreamScorerLeftAlone", "slipstream_rewardd_breaker_open_by_scorer == 1", "5m", "warning",
        "{{ $labels.name }} leaves the scorer {{ $labels.scorer }} alone: it judges nothing", "the log of that daemon",
    ),
    Alert(
        "SlipstreamRewardQueueOld", "slipstream_rewardd_queue_oldest_s > 30", "10m", "warning",
        "{{ $labels.name }} holds an answer for {{ $value | humanizeDuration }}", "docs/tuning.md: reward daemons",
    ),
    Alert(
        "SlipstreamWeightsBehind", "slipstream_policy_version - slipstream_published_version > 2", "15m", "warning",
        "Generators are {{ $value }} versions behind", "logs of trainer and generators: weight transfers fail",
    ),
    Alert(
        "SlipstreamKvCacheFull", "slipstream_generator_kv_demand > 1", "30m", "warning",
        "{{ $labels.name }} wants {{ $value | humanizePercentage }} of its KV cache", "docs/tuning.md: KV cache",
    ),
    Alert(
        "SlipstreamSinkDrops", "increase(slipstream_sinks_dropped_by_sink_total[1h]) > 0", "0m", "info",
        "The metric sink {{ $labels.sink }} loses records", "the coordinator's log; metrics.jsonl has them all",
    ),
)  # fmt: skip


def alert_rules() -> dict[str, Any]:
    """The rule file as Prometheus reads it."""
    rules = [
        {
            "alert": alert.name,
            "expr": scoped(alert.expr) if alert.expr != "up == 0" else f'up{{job="{JOB}"}} == 0',
            "for": alert.hold,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "action": alert.action},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "slipstream", "rules": rules}]}
