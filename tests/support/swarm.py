"""Many scripted generators and a trainer stand-in in one thread: one DEALER socket per generator and server.

They speak the real messages at the real pace of requests, answers, acknowledgements and heartbeats, but do no work:
an answer is made of prepared arrays. The sockets share one context and one epoll set, so 512 of them cost little more
than eight, and what is measured is the coordinator and the reward daemon.

A generator holds up to `window` slots, asks for more when half of them are free, and sends an answer as soon as it has
the slot (or at `rate` answers a second over all generators). The trainer stand-in takes every batch, fetches every
rank's shard, reports it trained and published, and commits a checkpoint now and then, so that leases flow and the
journal is pruned.
"""

import heapq
import select
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from time import monotonic

import numpy as np
import zmq

from protocol import framing
from protocol import messages as m
from protocol.config import Config
from protocol.sockets import make_hello, wire

Answered = Callable[[m.AnyBody], None]
CHECKPOINT_EVERY = 4
EMPTY_GRANT_S = (0.02, 0.5)


class Dealer:
    """One DEALER: sends messages, calls back with the answers. A message that cannot be queued at once is an error."""

    def __init__(
        self, context: zmq.Context, address: str, *, hello: m.Hello, config: Config, on_send: Callable[[int], object]
    ) -> None:
        self.socket: zmq.Socket = context.socket(zmq.DEALER)
        wire.configure(self.socket, config.transport)
        self.socket.setsockopt(zmq.ROUTING_ID, f"{hello.name}/{hello.incarnation}".encode())
        self.socket.connect(address)
        self.is_up = False
        self._limit = wire.max_bytes(config.transport)
        self._msg_ids = count(1)
        self._waiting: dict[int, Answered] = {}
        self._hello = hello
        self._on_send = on_send
        self.fd: int = self.socket.getsockopt(zmq.FD)

    def greet(self, then: Answered) -> None:
        def answered(body: m.AnyBody) -> None:
            assert isinstance(body, m.Welcome), body
            self.is_up = True
            then(body)

        self.send(self._hello, then=answered)

    def send(
        self, body: m.AnyBody, *, arrays: Mapping[str, np.ndarray] | None = None, then: Answered | None = None
    ) -> None:
        msg_id = next(self._msg_ids)
        if then is not None:
            self._waiting[msg_id] = then
        wire.send(self.socket, framing.encode(m.Envelope(body=body, msg_id=msg_id), arrays))
        self._on_send(self.fd)

    def drain(self) -> bool:
        """Take all messages that are there; whether there was any."""
        any_came = False
        while True:
            try:
                incoming = wire.receive(self.socket, has_routing_id=False, limit=self._limit)
            except zmq.Again:
                return any_came
            any_came = True
            assert incoming.envelope is not None, incoming.problem
            then = self._waiting.pop(incoming.envelope.reply_to or 0, None)
            if then is not None:
                then(incoming.envelope.body)


class Swarm:
    """`num` generators and one trainer; drive it with `run_for`. Counters are plain attributes, over its whole life.

    Args:
        num_tokens: response tokens of each answer.
        window: most slots a generator holds.
        rate: answers per second over all generators; None = as fast as they are acknowledged.
    """

    def __init__(
        self, config: Config, *, num: int, num_tokens: int, window: int, rate: float | None = None, tag: str = "g"
    ) -> None:
        self.num_acked = 0
        self.num_busy = 0
        self.num_batches = 0
        self.grant_s: list[float] = []
        self.statuses: dict[str, int] = {}
        self.version = 0
        self._config = config
        self._window = window
        self.rate = rate
        self._tag = tag
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._epoll = select.epoll()
        self._by_fd: dict[int, Dealer] = {}
        self._touched: set[int] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ready: deque[tuple[Generator, m.Lease, int]] = deque()
        self._next_answer = monotonic()
        self._text = "x " * (2 * num_tokens)
        self._response = np.full(num_tokens, 65, "<i4")
        self._logp = np.full(num_tokens, -0.5, "<f4")
        self._mask = np.ones(num_tokens, "|u1")
        self._prompts: dict[str, np.ndarray] = {}
        self._versions: tuple[int, np.ndarray] = (-1, self._response)
        self.trainer = Trainer(self)
        self.generators = [Generator(self, f"{tag}-{i}") for i in range(num)]

    # ------------------------------------------------------------ the loop

    def start(self, *, deadline_s: float = 30.0) -> None:
        """Let everyone say hello; returns when all generators may ask for leases.

        Raises:
            TimeoutError: somebody was not welcomed by the deadline.
        """
        end = monotonic() + deadline_s
        self.trainer.start()
        for generator in self.generators:
            generator.start()
        while not all(generator.rewardd is not None and generator.rewardd.is_up for generator in self.generators):
            if monotonic() > end:
                raise TimeoutError(f"{len(self.generators)} generators were not all welcomed in {deadline_s:g} s")
            self._turn(monotonic() + 0.05)

    def run_for(self, seconds: float) -> None:
        """Work for this long."""
        end = monotonic() + seconds
        while monotonic() < end:
            self._turn(end)

    def close(self) -> None:
        """Hand every lease back by saying goodbye, and close the sockets."""
        for dealer in self._by_fd.values():
            dealer.socket.linger = 500
            dealer.send(m.Goodbye(reason="done"))
        for dealer in list(self._by_fd.values()):
            dealer.socket.close()
        self._epoll.close()
        self._context.term()

    def _turn(self, end: float) -> None:
        now = monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        self._answer_ready(monotonic())
        until = min(end, self._timers[0][0] if self._timers else end)
        if self._ready and self.rate is not None:
            until = min(until, self._next_answer)
        elif self._ready:
            until = now
        for fd, _ in self._epoll.poll(max(0.0, until - monotonic())):
            self._by_fd[fd].drain()
        # The descriptor of a ZeroMQ socket is edge-triggered, and sending may swallow the edge.
        while self._touched:
            self._by_fd[self._touched.pop()].drain()

    def _answer_ready(self, now: float) -> None:
        burst = 64
        while self._ready and burst and (self.rate is None or now >= self._next_answer):
            burst -= 1
            generator, lease, slot = self._ready.popleft()
            if self.rate is not None:
                self._next_answer = max(self._next_answer + 1 / self.rate, now - 0.1)
            generator.answer(lease, slot)

    # ------------------------------------------------------------ for its peers

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (monotonic() + seconds, next(self._order), action))

    def connect(self, address: str, *, role: str, name: str) -> Dealer:
        hello = make_hello(role, name=name)  # type: ignore[arg-type]
        dealer = Dealer(self._context, address, hello=hello, config=self._config, on_send=self._touched.add)
        self._by_fd[dealer.fd] = dealer
        self._epoll.register(dealer.fd, select.EPOLLIN | select.EPOLLET)
        return dealer

    def ready(self, generator: "Generator", lease: m.Lease, slot: int) -> None:
        self._ready.append((generator, lease, slot))

    def arrays_of(self, lease: m.Lease) -> dict[str, np.ndarray]:
        ids = self._prompts.get(lease.prompt_id)
        if ids is None:
            prompt = np.asarray(lease.prompt_token_ids, "<i4")
            ids = self._prompts[lease.prompt_id] = np.concatenate([prompt, self._response])
        version, versions = self._versions
        if version != self.version:
            self._versions = self.version, np.full(len(self._response), self.version, "<i4")
            versions = self._versions[1]
        return {"token_ids": ids, "logp_behaviour": self._logp, "versions": versions, "loss_mask": self._mask}

    @property
    def text(self) -> str:
        return self._text

    @property
    def window(self) -> int:
        return self._window

    @property
    def config(self) -> Config:
        return self._config


class Generator:
    """One scripted generator."""

    def __init__(self, swarm: Swarm, name: str) -> None:
        self.name = name
        self.rewardd: Dealer | None = None
        self._swarm = swarm
        self._num_held = 0
        self._is_asking = False
        self._pause_s = EMPTY_GRANT_S[0]
        self._coordinator = swarm.connect(swarm.config.coordinator.listen, role="generator", name=name)

    def start(self) -> None:
        self._coordinator.greet(self._on_welcome)

    def _on_welcome(self, body: m.AnyBody) -> None:
        assert isinstance(body, m.Welcome) and body.rewardd, "start the reward daemons first"
        address = body.rewardd[sum(self.name.encode()) % len(body.rewardd)].address
        self.rewardd = self._swarm.connect(address, role="generator", name=self.name)
        self.rewardd.greet(lambda _: self._ask())
        self._swarm.after((hash(self.name) % 997) / 997 * self._swarm.config.transport.heartbeat_s, self._beat)

    def _beat(self) -> None:
        beat = m.Heartbeat(state="working", policy_version=self._swarm.version, idle_fractions={"working": 1.0})
        for dealer in (self._coordinator, self.rewardd):
            if dealer is not None:
                dealer.send(beat)
        self._swarm.after(self._swarm.config.transport.heartbeat_s, self._beat)

    def _ask(self) -> None:
        if self._is_asking or self._num_held > self._swarm.window // 2:
            return
        self._is_asking = True
        asked_at = monotonic()
        request = m.LeaseRequest(max_slots=self._swarm.window - self._num_held, policy_version=self._swarm.version)
        self._coordinator.send(request, then=lambda body: self._on_grant(body, asked_at))

    def _on_grant(self, body: m.AnyBody, asked_at: float) -> None:
        assert isinstance(body, m.LeaseGrant), body
        self._swarm.grant_s.append(monotonic() - asked_at)
        self._is_asking = False
        if not body.leases:
            self._swarm.after(self._pause_s, self._ask)
            self._pause_s = min(EMPTY_GRANT_S[1], 2 * self._pause_s)
            return
        self._pause_s = EMPTY_GRANT_S[0]
        for lease in body.leases:
            for slot in lease.slots:
                self._num_held += 1
                self._swarm.ready(self, lease, slot)

    def answer(self, lease: m.Lease, slot: int) -> None:
        """Send one answer; it is sent again when the daemon is busy."""
        assert self.rewardd is not None
        arrays = self._swarm.arrays_of(lease)
        num_response = len(arrays["loss_mask"])
        trajectory = m.Trajectory(
            group_id=lease.group_id,
            slot=slot,
            attempt=lease.attempt,
            prompt_id=lease.prompt_id,
            generator=self.name,
            purpose=lease.purpose,
            stage=lease.stage,
            num_prompt_tokens=len(lease.prompt_token_ids),
            num_response_tokens=num_response,
            finish_reason="length",
            stop_reason="",
            sampling=lease.sampling,
            response_text=self._swarm.text,
            tokenizer_hash="",
            seconds=1.0,
        )
        self.rewardd.send(trajectory, arrays=arrays, then=lambda body: self._on_ack(body, lease, slot))

    def _on_ack(self, body: m.AnyBody, lease: m.Lease, slot: int) -> None:
        if isinstance(body, m.Busy):
            self._swarm.num_busy += 1
            self._swarm.after(body.retry_after_s, lambda: self.answer(lease, slot))
            return
        assert isinstance(body, m.TrajectoryAck), body
        self._num_held -= 1
        self._swarm.num_acked += body.status == "accepted"
        self._swarm.statuses[body.status] = self._swarm.statuses.get(body.status, 0) + 1
        self._ask()


class Trainer:
    """Takes batches, fetches their shards and reports them trained, at once."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._dealer = swarm.connect(swarm.config.coordinator.listen, role="trainer", name="trainer")
        self._num_ranks = swarm.config.trainer.num_ranks
        self._attempt = 0
        self._batch = 0

    def start(self) -> None:
        def welcomed(body: m.AnyBody) -> None:
            assert isinstance(body, m.Welcome)
            self._swarm.version = body.policy_version
            self._beat()
            self._send(m.StatusRequest(), self._on_status)

        self._dealer.greet(welcomed)

    def _send(self, body: m.AnyBody, then: Answered) -> None:
        self._dealer.send(body, then=then)

    def _beat(self) -> None:
        beat = m.Heartbeat(state="training", policy_version=self._swarm.version, idle_fractions={"working": 1.0})
        self._dealer.send(beat)
        self._swarm.after(self._swarm.config.transport.heartbeat_s, self._beat)

    def _on_status(self, body: m.AnyBody) -> None:
        """The stand-in of an earlier swarm trained up to here and left no checkpoint: go on where it stopped."""
        assert isinstance(body, m.StatusReply)
        self._batch = body.num_updates
        resume = m.ResumeRequest(
            last_batch_id=self._batch, policy_version=body.policy_version, num_ranks=self._num_ranks
        )
        self._send(resume, self._on_plan)

    def _on_plan(self, body: m.AnyBody) -> None:
        assert isinstance(body, m.ResumePlan), body
        self._attempt = body.attempt
        self._next()

    def _next(self) -> None:
        request = m.BatchRequest(after_batch_id=self._batch, policy_version=self._swarm.version, wait_s=1.0)
        self._send(request, self._on_batch)

    def _on_batch(self, body: m.AnyBody) -> None:
        if isinstance(body, m.BatchNotReady):
            self._next()
            return
        assert isinstance(body, m.BatchPlan), body
        self._fetch(body, 0)

    def _fetch(self, plan: m.BatchPlan, rank: int) -> None:
        if rank == self._num_ranks:
            self._report(plan)
            return

        def fetched(body: m.AnyBody) -> None:
            assert isinstance(body, m.Shard), body
            self._fetch(plan, rank + 1)

        self._send(m.ShardRequest(batch_id=plan.batch_id, rank=rank, num_ranks=self._num_ranks), fetched)

    def _report(self, plan: m.BatchPlan) -> None:
        version = plan.policy_version + 1

        def counted(body: m.AnyBody) -> None:
            assert isinstance(body, m.Ack), body
            self._batch, self._swarm.version = plan.batch_id, version
            self._swarm.num_batches += 1
            names = [generator.name for generator in self._swarm.generators]
            published = m.VersionPublished(policy_version=version, epoch=1, generators=names, seconds=0.1)
            self._dealer.send(published)
            if plan.batch_id % CHECKPOINT_EVERY == 0:
                done = m.CheckpointCommitted(batch_id=plan.batch_id, policy_version=version, path="none")
                self._dealer.send(done)
            self._next()

        trained = m.BatchTrained(
            batch_id=plan.batch_id,
            attempt=self._attempt,
            policy_version=version,
            num_applied=1,
            num_skipped=0,
            replayed=False,
            num_trained_tokens=sum(item.num_response_tokens for item in plan.items),
            num_stale_tokens=0,
            max_token_staleness=0,
        )
        self._send(trained, counted)
