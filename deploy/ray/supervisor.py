"""The actor that holds a run's roles to what is wanted: places missing ones, replaces lost ones, stops surplus ones.

It keeps nothing that cannot be found again: role actors are named and detached, so a supervisor that Ray restarts
takes over those that live.
"""

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.local.instance import STOP_MARGIN_S
from deploy.local.specs import ROLES, STOP_ORDER
from deploy.ray.placement import Cluster, resources_of
from deploy.ray.role import RoleActor
from protocol.config import Config

NAMESPACE = "slipstream"
TICK_S = 0.5
SCALABLE = ("generator", "rewardd")


@dataclass
class Held:
    """A role actor and what it last said; `poll` is the question under way."""

    handle: Any
    group: PlacementGroup | None
    state: dict[str, Any]
    poll: Any = None
    stop_by: float | None = None


def actor_name(run_name: str, instance: str) -> str:
    """Name of a role's actor in the namespace `slipstream`."""
    return f"{run_name}/{instance}"


class RaySupervisor:
    """One run on Ray. Methods are called by the command line; the loop has a thread of its own."""

    def __init__(self, *, values: dict[str, Any], cluster: Cluster) -> None:
        self._values = values
        self._config = Config.model_validate(values)
        self._cluster = cluster
        self._wanted = {
            "coordinator": 1,
            "rewardd": self._config.rewardd.num,
            "trainer": 1,
            "generator": self._config.generators.num,
        }
        self._held: dict[str, Held] = {}
        self._finished: dict[str, dict[str, Any]] = {}
        self._ready_at: dict[str, float] = {}
        self._num_lost: dict[str, int] = {}
        self._ending_at = float("inf")
        self._stopping = False
        self._failure = ""
        self._lock = threading.Lock()
        self._adopt()
        threading.Thread(target=self._loop, daemon=True).start()

    # ------------------------------------------------------------ commands

    def snapshot(self) -> dict[str, Any]:
        """What the local supervisor's state file holds, plus `over` and the last `failure` of the loop."""
        with self._lock:
            roles = [h.state | {"num_lost": self._num_lost.get(n, 0)} for n, h in self._held.items()]
            return {
                "stopping": self._stopping,
                "over": self._is_over(),
                "finished": all(name in self._finished for name in ("coordinator", "trainer")),
                "failure": self._failure,
                "roles": [*roles, *self._finished.values()],
            }

    def scale(self, role: str, count: int) -> None:
        """Want that many generators or reward daemons from now on."""
        if role not in SCALABLE:
            raise ValueError(f"{role} cannot be scaled: generators and rewardd can")
        with self._lock:
            self._wanted[role] = count
            self._finished = {n: s for n, s in self._finished.items() if s["role"] != role}

    def restart(self, name: str) -> list[str]:
        """Restart the instances of this name or role; returns their names."""
        with self._lock:
            names = [n for n, held in self._held.items() if name in (n, held.state["role"])]
            for each in names:
                self._held[each].handle.stop.remote(restart=True)
        return names

    def stop(self) -> None:
        """Begin an orderly stop of everything; `snapshot()["over"]` tells when it is done."""
        with self._lock:
            self._stopping = True

    def logs(self, name: str, num_lines: int) -> list[str]:
        """The last lines of an instance's log, from the node it runs on."""
        with self._lock:
            held = self._held.get(name)
        return ray.get(held.handle.tail.remote(num_lines), timeout=10.0) if held else []

    # ------------------------------------------------------------ loop

    def _loop(self) -> None:
        tick = threading.Event()
        while not tick.wait(TICK_S):
            with self._lock:
                try:
                    self._step(time.monotonic())
                    self._failure = ""
                except RayError as error:
                    self._failure = str(error)

    def _step(self, now: float) -> None:
        for name in list(self._held):
            self._ask(name, now)
        self._notice_end(now)
        wanted = [] if self._stopping else self._wanted_names()
        for name in wanted:
            if name not in self._held and name not in self._finished and now >= self._ready_at.get(name, 0.0):
                self._held[name] = self._place(name)
        surplus = [name for name in self._held if name not in wanted]
        for name in self._may_stop_now(surplus):
            held = self._held[name]
            if held.stop_by is None:
                held.stop_by = now + self._config.deploy.stop_grace_s + STOP_MARGIN_S
                held.handle.stop.remote()
            is_gone = held.state["state"] in ("stopped", "finished") or not held.state["node"]
            if is_gone or now >= held.stop_by:
                self._remove(name)

    def _wanted_names(self) -> list[str]:
        return [
            role if role in ("coordinator", "trainer") else f"{role}-{index}"
            for role in ROLES
            for index in range(self._wanted[role])
        ]

    def _may_stop_now(self, surplus: list[str]) -> list[str]:
        """Producers and the learner first, while the coordinator still takes what they hand back."""
        for phase in STOP_ORDER:
            found = [name for name in surplus if self._held[name].state["role"] in phase]
            if found:
                return found
        return []

    def _ask(self, name: str, now: float) -> None:
        held = self._held[name]
        if held.poll is None:
            held.poll = held.handle.poll.remote()
        try:
            held.state = ray.get(held.poll, timeout=0.05)
            held.poll = None
        except GetTimeoutError:
            return
        except RayError:
            self._lost(name, now)
            return
        if held.state["state"] == "finished" and held.stop_by is None:
            self._finished[name] = held.state
            self._remove(name)

    def _lost(self, name: str, now: float) -> None:
        """The actor or its node is gone: place it anew, elsewhere if need be."""
        num = self._num_lost[name] = self._num_lost.get(name, 0) + 1
        deploy = self._config.deploy
        self._ready_at[name] = now + min(deploy.max_backoff_s, deploy.backoff_s * 2 ** min(num - 1, 16))
        self._remove(name)

    def _notice_end(self, now: float) -> None:
        """Once coordinator and trainer have finished, the others get the grace time to notice by themselves."""
        if all(name in self._finished for name in ("coordinator", "trainer")):
            self._ending_at = min(self._ending_at, now + self._config.deploy.stop_grace_s)
            self._stopping |= now >= self._ending_at

    def _is_over(self) -> bool:
        wanted = self._wanted_names()
        return not self._held and (self._stopping or all(name in self._finished for name in wanted))

    # ------------------------------------------------------------ actors

    def _place(self, name: str) -> Held:
        role, _, index = name.partition("-")
        resources = resources_of(self._config, role, cluster=self._cluster)
        group = placement_group(
            [resources],
            strategy="STRICT_PACK",
            name=actor_name(self._config.run.name, name),
            lifetime="detached",
        )
        own = {key: value for key, value in resources.items() if key not in ("CPU", "GPU")}
        options = ray.remote(RoleActor).options(
            name=actor_name(self._config.run.name, name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            max_concurrency=4,
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0.0),
            resources=own,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        )
        handle = options.remote(values=self._values, role=role, index=int(index or 0))
        return Held(handle, group, _placing(role, name))

    def _remove(self, name: str) -> None:
        held = self._held.pop(name)
        with contextlib.suppress(RayError, ValueError):
            ray.kill(held.handle)
        with contextlib.suppress(RayError, ValueError):
            if held.group is not None:
                remove_placement_group(held.group)

    def _adopt(self) -> None:
        """Takes over the role actors that an earlier supervisor of this run left running."""
        prefix = actor_name(self._config.run.name, "")
        for found in ray.util.list_named_actors(all_namespaces=True):
            if found["namespace"] != NAMESPACE or not found["name"].startswith(prefix):
                continue
            name = found["name"].removeprefix(prefix)
            role = name.partition("-")[0]
            if role in SCALABLE:
                self._wanted[role] = max(self._wanted[role], int(name.partition("-")[2]) + 1)
            if role in ROLES:
                group = None
                with contextlib.suppress(ValueError):
                    group = ray.util.get_placement_group(found["name"])
                handle = ray.get_actor(found["name"], namespace=NAMESPACE)
                self._held[name] = Held(handle, group, _placing(role, name))


def _placing(role: str, name: str) -> dict[str, Any]:
    """The state of an actor that has not answered yet: Ray looks for room, or starts its process."""
    return {
        "role": role,
        "name": name,
        "state": "waiting",
        "ready": False,
        "since": time.time(),
        "pids": [],
        "num_restarts": 0,
        "last_exit": None,
        "log": "",
        "node": "",
    }
