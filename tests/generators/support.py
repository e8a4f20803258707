"""A coordinator and a reward daemon in one thread, just real enough for a generator; and small configurations."""

import threading
from collections.abc import Callable
from typing import Any

from protocol.config import Config
from protocol.config.services import TransportSection
from protocol.messages import (
    Ack,
    AnyBody,
    Busy,
    HandBack,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    RewarddAddress,
    SamplingParams,
    SlotRef,
    Trajectory,
    TrajectoryAck,
    Welcome,
)
from protocol.sockets import Received, Server

TRANSPORT = TransportSection(
    heartbeat_s=0.1, peer_timeout_s=2.0, connect_deadline_s=10.0, request_deadline_s=5.0, ack_deadline_s=1.0
)


def sampling_params(**changes: Any) -> SamplingParams:
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 32,
        "min_tokens": 0,
        "stop_token_ids": (258,),
        "stop": (),
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
    }
    return SamplingParams(**{**values, **changes})


def make_config(model: str, *, run_dir: str, coordinator: str = "tcp://127.0.0.1:0", **generators: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": run_dir},
            "model": {"path": model, "dtype": "float32"},
            "data": {"train_files": ["none"], "max_prompt_tokens": 256},
            "sampling": {"max_response_tokens": 256, "temperature": 0.5},
            "coordinator": {"listen": coordinator},
            "generators": {"max_num_seqs": 16, "device": "cpu", "threads": 1, "drain_s": 0.5, **generators},
            "transport": TRANSPORT.model_dump(),
            "weights": {"deadline_s": 8.0, "join_deadline_s": 8.0},
            "deploy": {"stop_grace_s": 8.0},
        }
    )


class FakeRun:
    """Grants what `leases` holds, acknowledges trajectories (after `busy` refusals), keeps all it was told."""

    def __init__(self, *, busy: int = 0) -> None:
        self.leases: list[tuple[Lease, dict[str, Any]]] = []
        self.waiting_for = "staleness"
        self.trajectories: list[Received] = []
        self.handed_back: list[Received] = []
        self.heartbeats: list[Heartbeat] = []
        self.cancel: list[SlotRef] = []
        self.command = ""
        self.published_version = 0
        self.weights_address: str | None = None
        self.mute_rewardd = False
        self.on_trajectory: Callable[[Trajectory], None] | None = None
        self._busy = busy
        self._coordinator = Server("tcp://127.0.0.1:0", name="coordinator", transport=TRANSPORT, accept=self._accept)
        self._rewardd = Server("tcp://127.0.0.1:0", name="rewardd-0", transport=TRANSPORT, accept=self._accept)
        self.address = self._coordinator.address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _daemons(self) -> list[RewarddAddress]:
        return [RewarddAddress(name="rewardd-0", address=self._rewardd.address)]

    def _accept(self, hello: Hello) -> Welcome:
        return Welcome(
            server="fake",
            incarnation="x",
            run_id="run",
            policy_version=self.published_version,
            published_version=self.published_version,
            rewardd=self._daemons(),
            weights_address=self.weights_address,
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            for server in (self._coordinator, self._rewardd):
                for received in server.poll(0.01):
                    answer, arrays = self._answer(server, received)
                    if answer is not None:
                        server.send(received.peer, answer, arrays=arrays, reply_to=received.envelope.msg_id)
        for server in (self._coordinator, self._rewardd):
            server.close(deadline_s=0.1)

    def _answer(self, server: Server, received: Received) -> tuple[AnyBody | None, dict[str, Any] | None]:
        body = received.body
        if isinstance(body, Heartbeat) and server is self._coordinator:
            return self._beat(body), None
        if isinstance(body, LeaseRequest):
            return self._grant(body)
        if isinstance(body, HandBack):
            self.handed_back.append(received)
            return Ack(), None
        if isinstance(body, Trajectory):
            return self._judge(received, body), None
        return Ack(), None

    def _beat(self, body: Heartbeat) -> HeartbeatAck:
        self.heartbeats.append(body)
        cancel, self.cancel = self.cancel, []
        return HeartbeatAck(
            policy_version=self.published_version,
            published_version=self.published_version,
            rewardd=self._daemons(),
            weights_address=self.weights_address,
            cancel=cancel,
            command=self.command,
        )

    def _grant(self, body: LeaseRequest) -> tuple[LeaseGrant, dict[str, Any]]:
        granted: list[Lease] = []
        arrays: dict[str, Any] = {}
        room = body.max_slots
        while self.leases and len(self.leases[0][0].slots) <= room:
            lease, its_arrays = self.leases.pop(0)
            room -= len(lease.slots)
            granted.append(lease)
            arrays.update(its_arrays)
        return LeaseGrant(leases=granted, waiting_for="" if granted else self.waiting_for), arrays

    def _judge(self, received: Received, body: Trajectory) -> AnyBody | None:
        if self.mute_rewardd:
            return None
        if self._busy > 0:
            self._busy -= 1
            return Busy(retry_after_s=0.05, reason="full")
        self.trajectories.append(received)
        return TrajectoryAck(group_id=body.group_id, slot=body.slot, attempt=body.attempt, status="accepted")


def make_lease(group_id: int = 1, *, slots: int = 4, attempt: int = 1, min_version: int = 0, **sampling: Any) -> Lease:
    return Lease(
        group_id=group_id,
        prompt_id=f"p{group_id}",
        attempt=attempt,
        slots=list(range(slots)),
        prompt_token_ids=[70, 71, 72, group_id % 256],
        sampling=sampling_params(**sampling),
        deadline_s=60.0,
        min_version=min_version,
    )
