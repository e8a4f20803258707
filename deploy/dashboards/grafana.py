"""The Grafana dashboard: panels whose queries use metrics of the table."""

from dataclasses import dataclass
from typing import Any

from deploy.dashboards.queries import scoped

SELECTOR = 'instance=~"$coordinator"'
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, PER_ROW = 8, 8, 3
SCHEMA_VERSION = 39


@dataclass(frozen=True)
class Panel:
    """One graph: (query, legend) pairs, and Grafana's name of the unit."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False


ROWS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("Reward", "short", (("slipstream_rollout_reward_mean", "mean score"),
                                  ("slipstream_rollout_correct_fraction", "correct"))),
        Panel("Answer length", "short", (("slipstream_rollout_response_tokens_mean", "mean tokens"),
                                         ("slipstream_rollout_response_tokens_max", "longest"))),
        Panel("Groups without signal, cut answers", "percentunit",
              (("slipstream_rollout_equal_reward_groups", "equal rewards"),
               ("slipstream_rollout_truncated_fraction", "cut"))),
        Panel("Entropy", "short", (("slipstream_actor_entropy", "nats per token"),)),
        Panel("KL, nats per token", "short", (("slipstream_actor_kl_behaviour", "behaviour"),
                                              ("slipstream_actor_kl_ref", "reference"),
                                              ("slipstream_actor_ppo_kl", "within the update"))),
        Panel("Gradient norm", "short", (("slipstream_actor_grad_norm", "mean"),
                                         ("slipstream_actor_grad_norm_max", "largest"))),
        Panel("Off-policy correction", "percentunit",
              (("slipstream_importance_ess", "effective sample size"),
               ("slipstream_importance_capped_share", "capped weights"),
               ("slipstream_actor_clip_fraction_high", "clipped high"),
               ("slipstream_actor_clip_fraction_low", "clipped low"))),
        Panel("Staleness of tokens, versions", "short", (("slipstream_staleness_token_mean", "mean"),
                                                         ("slipstream_staleness_token_max", "oldest"))),
        Panel("Tokens too old to train", "percentunit", (("slipstream_staleness_masked_share", "share"),)),
    ),
    "Pace": (
        Panel("Tokens per second", "short", (("slipstream_generated_tokens_per_s", "generated"),
                                             ("rate(slipstream_trained_tokens_total[10m])", "trained"))),
        Panel("Seconds per update", "s", (("slipstream_perf_update_seconds", "update"),)),
        Panel("Idle share", "percentunit", (("slipstream_idle_trainer", "trainer"),
                                            ("slipstream_idle_generators", "generators"),
                                            ("slipstream_idle_reward", "reward"))),
        Panel("The trainer's time", "percentunit",
              (('avg by (cause) (slipstream_role_time_share{role="trainer"})', "{{cause}}"),), stacked=True),
        Panel("The generators' time", "percentunit",
              (('avg by (cause) (slipstream_role_time_share{role="generator"})', "{{cause}}"),), stacked=True),
        Panel("Packing and FLOPs", "percentunit", (("slipstream_packing_fill_fraction", "fill of micro-batches"),
                                                   ("slipstream_perf_mfu_actor", "MFU"))),
        Panel("Groups", "short", (("slipstream_queue_groups_generating", "generating"),
                                  ("slipstream_queue_groups_waiting", "waiting"),
                                  ("slipstream_queue_groups_training", "training")), stacked=True),
        Panel("Age of the oldest group", "s", (("slipstream_queue_oldest_age_s", "age"),)),
        Panel("Versions", "short", (("slipstream_policy_version", "trained"),
                                    ("slipstream_published_version", "published"))),
    ),
    "Services": (
        Panel("Generators: answers being sampled", "short", (("slipstream_generator_running", "{{name}}"),)),
        Panel("Generators: KV cache wanted", "percentunit", (("slipstream_generator_kv_demand", "{{name}}"),)),
        Panel("Generators: pause for new weights", "s", (("slipstream_generator_update_pause_s", "{{name}}"),)),
        Panel("Reward daemons: answers held", "short", (("slipstream_rewardd_queue_depth", "{{name}}"),)),
        Panel("Answers per second by verdict", "short",
              (("rate(slipstream_verdicts_by_verdict_total[10m])", "{{verdict}}"),), stacked=True),
        Panel("Attempts again, by reason, per hour", "short",
              (("increase(slipstream_failed_attempts_by_reason_total[1h])", "{{reason}}"),), stacked=True),
        Panel("Live processes", "short", (("sum by (role) (slipstream_role_up)", "{{role}}"),)),
        Panel("Alarms", "short", (("slipstream_alarm", "{{alarm}}"),)),
        Panel("Trainer memory, journal", "decmbytes", (("slipstream_learner_resident_mb", "trainer"),
                                                       ("slipstream_queue_journal_mb", "journal"))),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model (schema version 39: Grafana 10.4 and later)."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(_row(title, number=len(panels) + 1, top=top))
        top += 1
        for index, panel in enumerate(row):
            place = {
                "x": index % PER_ROW * WIDTH,
                "y": top + index // PER_ROW * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            }
            panels.append(_graph(panel, number=len(panels) + 1, place=place))
        top += -(-len(row) // PER_ROW) * HEIGHT
    return {
        "uid": "slipstream",
        "title": "Slipstream",
        "tags": ["slipstream"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    query = scoped("label_values(slipstream_run_info, instance)")
    coordinator = {
        "name": "coordinator",
        "label": "Coordinator",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "coordinators"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "sort": 1,
        "current": {},
    }
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}
    return [source, coordinator]


def _row(title: str, *, number: int, top: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": WIDTH * PER_ROW, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _graph(panel: Panel, *, number: int, place: dict[str, int]) -> dict[str, Any]:
    drawing: dict[str, Any] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if panel.stacked else 0}
    if panel.stacked:
        drawing["stacking"] = {"mode": "normal", "group": "A"}
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": scoped(query, selector=SELECTOR),
            "legendFormat": legend,
            "range": True,
        }
        for index, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": drawing}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }
