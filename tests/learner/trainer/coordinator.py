"""A scripted coordinator on a real socket, in a thread: plans, shards, acknowledgements; can go away and come back."""

import threading
from collections.abc import Callable, Sequence

from protocol.config import Config
from protocol.messages import (
    Ack,
    BatchNotReady,
    BatchRequest,
    BatchTrained,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Refused,
    ResumePlan,
    ResumeRequest,
    Shard,
    ShardRequest,
    Welcome,
)
from protocol.sockets import Server, new_incarnation
from tests.support.training import make_batch


class ScriptedCoordinator:
    """Hands out `num_batches` made-up batches in order, then says `ending` ("finished" or "stopped").

    `log` lists the bodies received, heartbeats and requests for batches apart. `on_body` sees each body first.
    """

    def __init__(
        self,
        config: Config,
        *,
        splits: Sequence[Sequence[Sequence[int]]],
        num_batches: int,
        ending: Sequence[str] = ("finished",),
        on_body: Callable[[object], None] = lambda body: None,
    ) -> None:
        self.config = config
        self.log: list[object] = []
        self.last_batch, self.version, self.published = 0, 0, 0
        self._splits, self._num_batches, self._endings = splits, num_batches, list(ending)
        self._on_body = on_body
        self._address = config.coordinator.listen
        self.resume()

    def resume(self) -> None:
        """Binds (again) and serves."""
        self.incarnation = new_incarnation()
        self._server = Server(self._address, name="coordinator", transport=self.config.transport, accept=self._accept)
        self._address = self.address = self._server.address
        self._closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._thread.join(10)
        self._server.close(deadline_s=0.2)

    def of(self, kind: type) -> list:
        return [body for body in self.log if isinstance(body, kind)]

    def batch(self, batch_id: int):
        """The made-up batch of this id, as every test sees it."""
        return make_batch(micro_batches=self._splits, batch_id=batch_id, policy_version=batch_id - 1, seed=batch_id - 1)

    def _accept(self, hello: Hello) -> Welcome:
        return Welcome(
            server="coordinator",
            incarnation=self.incarnation,
            run_id="test",
            policy_version=self.version,
            published_version=self.published,
        )

    def _serve(self) -> None:
        while not self._closing:
            for received in self._server.poll(0.02):
                body = received.envelope.body
                if isinstance(body, Goodbye):
                    continue
                if not isinstance(body, Heartbeat | BatchRequest):
                    self.log.append(body)
                self._on_body(body)
                answer, arrays = self._answer(body)
                self._server.send(received.peer, answer, arrays=arrays, reply_to=received.envelope.msg_id)

    def _answer(self, body):
        if isinstance(body, Heartbeat):
            return HeartbeatAck(policy_version=self.version, published_version=self.published), None
        if isinstance(body, ResumeRequest):
            replay = list(range(body.last_batch_id + 1, self.last_batch + 1))
            return ResumePlan(
                attempt=len(self.of(ResumeRequest)),
                replay=replay,
                published_version=self.published,
                max_updates=self._num_batches,
            ), None
        if isinstance(body, BatchRequest):
            if body.after_batch_id > self.last_batch:
                return Refused(code="unknown_batch", reason="not reported"), None
            if body.after_batch_id < self._num_batches:
                return self.batch(body.after_batch_id + 1).plan, None
            return BatchNotReady(waiting_for=self._endings.pop(0) if len(self._endings) > 1 else self._endings[0]), None
        if isinstance(body, ShardRequest):
            batch = self.batch(body.batch_id)
            indices = sorted(i for micro_batch in self._splits[body.rank] for i in micro_batch)
            names = ("token_ids", "logp_behaviour", "versions", "loss_mask")
            arrays = {f"{i}/{name}": getattr(batch.arrays[i], name) for i in indices for name in names}
            return Shard(batch_id=body.batch_id, indices=indices), arrays
        if isinstance(body, BatchTrained):
            self.last_batch = max(self.last_batch, body.batch_id)
            self.version = max(self.version, body.policy_version)
        return Ack(), None
