"""A coordinator for tests: real sockets, no ledger. Runs on a thread of the test, or as a process of its own.

python -m tests.support.fake_coordinator ADDRESS   (prints the address it listens on)
"""

import json
import sys
import threading
from collections import Counter

from protocol.config.services import TransportSection
from protocol.messages import (
    Ack,
    AnyBody,
    GroundTruth,
    GroundTruthRequest,
    GroundTruths,
    Heartbeat,
    HeartbeatAck,
    Hello,
    RewarddAddress,
    ScoredTrajectory,
    TrajectoryAck,
    Welcome,
)
from protocol.sockets import Received, Server, new_incarnation


def ground_truth(prompt_id: str, truth: object, *, data_source: str = "test", ability: str = "math") -> GroundTruth:
    payload = json.dumps({"style": "rule", "ground_truth": truth, "extra_info": {}})
    return GroundTruth(prompt_id=prompt_id, data_source=data_source, ability=ability, payload=payload)


class FakeCoordinator:
    """Answers hellos, heartbeats and ground-truth requests; acknowledges scored trajectories, keeps them if asked."""

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        transport: TransportSection,
        truths: dict[str, GroundTruth] | None = None,
        keep: bool = True,
    ) -> None:
        self.truths = truths or {}
        self.scored: list[Received] = []
        self.requested: Counter[str] = Counter()
        self.heartbeats: dict[str, Heartbeat] = {}
        self.hellos: dict[str, Hello] = {}
        self.command = ""
        self.keep = keep
        self.answer_scored = True
        self.incarnation = new_incarnation()
        self._seen: set[tuple[int, int, int]] = set()
        self._server = Server(address, name="coordinator", transport=transport, accept=self._accept)
        self.address = self._server.address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            for received in self._server.poll(0.05):
                answer = self._answer(received)
                if answer is not None:
                    self._server.send(received.peer, answer, reply_to=received.envelope.msg_id)
            for peer in self._server.gone():
                hello = self.hellos.get(peer.name)
                if hello is not None and hello.incarnation == peer.incarnation:
                    del self.hellos[peer.name]
        self._server.close(deadline_s=0.2)

    def _accept(self, hello: Hello) -> Welcome:
        self.hellos[hello.name] = hello
        return Welcome(
            server="coordinator", incarnation=self.incarnation, run_id="test", policy_version=0, published_version=0
        )

    def _answer(self, received: Received) -> AnyBody | None:
        body = received.body
        if isinstance(body, Heartbeat):
            self.heartbeats[received.peer.name] = body
            daemons = [
                RewarddAddress(name=hello.name, address=str(hello.attributes["address"]))
                for hello in self.hellos.values()
                if hello.role == "rewardd"
            ]
            return HeartbeatAck(policy_version=0, published_version=0, rewardd=daemons, command=self.command)
        if isinstance(body, GroundTruthRequest):
            self.requested.update(body.prompt_ids)
            return GroundTruths(items=[self.truths[key] for key in body.prompt_ids if key in self.truths])
        if isinstance(body, ScoredTrajectory):
            if not self.answer_scored:
                return None
            if self.keep:
                self.scored.append(received)
            slot = body.trajectory
            key = (slot.group_id, slot.slot, slot.attempt)
            status = "duplicate" if key in self._seen else "accepted"
            self._seen.add(key)
            return TrajectoryAck(group_id=key[0], slot=key[1], attempt=key[2], status=status)
        return Ack()


if __name__ == "__main__":
    coordinator = FakeCoordinator(sys.argv[1], transport=TransportSection(heartbeat_s=0.2, peer_timeout_s=1.0))
    print(coordinator.address, flush=True)
    threading.Event().wait()
