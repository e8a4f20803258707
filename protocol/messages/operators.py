"""Status and control: between the command line and the coordinator."""

from typing import Literal

from msgspec import Struct

from protocol.messages.base import Body


class StatusRequest(Body, frozen=True):
    """The command line asks what everything is doing."""


class RoleStatus(Struct, kw_only=True, frozen=True):
    """One role instance, as `slipstream status --json` prints it."""

    role: str
    name: str
    state: str
    since: float
    version: int
    progress_age_s: float
    waiting_for: str
    idle_fractions: dict[str, float] = {}
    metrics: dict[str, float] = {}
    pid: int = 0
    host: str = ""


class Advice(Struct, kw_only=True, frozen=True):
    """What the figures say about the settings: one line, by the rule of docs/tuning.md, with the setting to turn."""

    rule: str
    text: str
    setting: str


class StatusReply(Body, frozen=True):
    """Everything `slipstream status` shows. `series` are recent points for live curves."""

    run_id: str
    run_name: str
    run_state: str
    policy_version: int
    published_version: int
    num_updates: int
    max_updates: int
    roles: list[RoleStatus]
    queues: dict[str, float]
    staleness_histogram: dict[str, int]
    metrics: dict[str, float]
    ledger: dict[str, int]
    alarms: list[str] = []
    advice: list[Advice] = []
    series: dict[str, list[float]] = {}


class ControlRequest(Body, frozen=True):
    """stop (finish and save) | pause | resume."""

    command: Literal["stop", "pause", "resume"]
    reason: str = ""
