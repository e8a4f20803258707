"""Brings new versions from the trainer's rank 0 to all generators, on a thread of its own.

Control messages go over a ROUTER socket, bytes over an epoch's communicator (`learner.weights.transports`). One round:

    1. members   those that lack the newest version (`learner.weights.group`); none: wait
    2. epoch     unless the last round's group fits: a new store and group, WeightGroup to each, all report joined
    3. offer     WeightOffer: names, dtypes, shapes, checksums, buckets
    4. send      buckets from the snapshot; each member reports staged, then committed
    5. published VersionPublished with the members that committed

Any failure ends the round within its deadline: the communicator is aborted, the culprit fenced or retried alone, and
the next round forms a new epoch and sends the version again whole. The trainer never waits: `submit` replaces a
version not yet begun by a newer one.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from learner.weights.buckets import plan_buckets
from learner.weights.files import VersionFiles
from learner.weights.group import Member, Membership, choose_transport
from learner.weights.rounds import send_snapshot
from learner.weights.snapshot import Snapshot
from learner.weights.transports import Communicator, TransportFailed, connect, open_store
from protocol.config import Config
from protocol.logs import event
from protocol.messages import (
    Ack,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Refused,
    VersionPublished,
    WeightGroup,
    WeightJoin,
    WeightOffer,
    WeightStatus,
    Welcome,
)
from protocol.sockets import Received, Server, new_incarnation
from protocol.threads import in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")
_TURN_S = 0.02
_IDLE_TURN_S = 0.25
_HEAR_OUT_S = 1.0


class Publisher:
    """Owns the weight group. Thread-safe; all callbacks run on the publisher's thread.

    Args:
        tokenizer_hash: generators with another one are refused.
        on_published: told after each round which generators now hold which version.

    Raises:
        UserError: `weights.listen` cannot be bound.
    """

    def __init__(
        self, config: Config, *, tokenizer_hash: str, on_published: Callable[[VersionPublished], None]
    ) -> None:
        self._config = config
        self._on_published = on_published
        self._incarnation = new_incarnation()
        self._server = Server(
            config.weights.listen,
            name="weights",
            transport=config.transport,
            accept=self._accept,
            tokenizer_hash=tokenizer_hash,
            setting="weights.listen",
        )
        self.address = self._server.address
        self._membership = Membership()
        self._files = VersionFiles(Path(config.run.dir).absolute() / "weights")
        self._epoch = 0
        self._group: tuple[list[tuple[str, str]], Communicator] | None = None
        self._current: Snapshot | None = None
        self._pending: Snapshot | None = None
        self._last_error = ""
        self._last_seconds = 0.0
        self._state = threading.Condition()
        self._idle = True
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="weight-publisher", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the trainer's side

    def submit(self, snapshot: Snapshot) -> None:
        """Hands over a version; never blocks. One that was submitted before and not begun is dropped."""
        snapshot.mark_written()
        with self._state:
            self._pending = snapshot
            self._idle = False
        os.eventfd_write(self._wake, 1)

    def wait_idle(self, deadline_s: float) -> bool:
        """Waits until the newest version is with every member that can take it; False at the deadline."""
        with self._state:
            return self._state.wait_for(lambda: self._idle, timeout=deadline_s)

    def status(self) -> dict[str, Any]:
        """What the publisher is doing: epoch, target version, holders, members given up (with reasons), last error."""
        membership = self._membership
        return {
            "epoch": self._epoch,
            "policy_version": -1 if membership.target is None else membership.target,
            "members": sorted(membership.members),
            "holders": membership.holders(),
            "given_up": membership.given_up(),
            "last_error": self._last_error,
            "last_seconds": self._last_seconds,
        }

    def close(self, deadline_s: float = 5.0) -> None:
        """Ends the thread and the weight group."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(deadline_s)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:
            log.critical("the weight publisher failed", exc_info=True)
            raise
        finally:
            self._drop_group()
            self._server.close(deadline_s=0.5)
            os.close(self._wake)

    def _turn(self) -> None:
        with self._state:
            if self._pending is not None:
                self._current, self._pending = self._pending, None
                self._membership.set_target(self._current.policy_version)
            receivers = self._membership.next_receivers(alive=self._heard_lately)
            self._idle = not receivers
            if self._idle:
                self._state.notify_all()
        if receivers:
            self._round(receivers)
        self._serve(_TURN_S if receivers else _IDLE_TURN_S)

    def _round(self, receivers: list[Member]) -> None:
        assert self._current is not None
        snapshot, started = self._current, time.monotonic()
        version = snapshot.policy_version
        try:
            if receivers[0].transport == "file":
                self._epoch += 1
                offer = self._offer(snapshot, path=str(self._off_loop(lambda: self._files.write(snapshot))))
                sending = None
                self._tell(receivers, offer)
            else:
                communicator = self._form(receivers)
                offer = self._off_loop(lambda: self._offer(snapshot))
                self._tell(receivers, offer)
                deadline_s = self._config.weights.deadline_s
                sending = in_thread(
                    "weight-sender",
                    lambda: send_snapshot(communicator, snapshot, offer.buckets, deadline_s=deadline_s),
                )
            self._await(receivers, "staged", version, sending, self._config.weights.deadline_s)
            self._await(receivers, "committed", version, None, self._config.weights.deadline_s)
        except (TransportFailed, ValueError, OSError) as error:
            self._last_error = str(error)
            event(log, logging.WARNING, "weight update failed", policy_version=version, reason=str(error))
            self._drop_group()
            self._hear_out(receivers)
            self._membership.blame(receivers, self._epoch)
        self._last_seconds = time.monotonic() - started
        committed = sorted(m.name for m in receivers if m.held == version)
        if committed:
            fields = {"policy_version": version, "epoch": self._epoch, "seconds": round(self._last_seconds, 3)}
            event(log, logging.INFO, "version published", generators=",".join(committed), **fields)
            self._on_published(
                VersionPublished(
                    policy_version=version, epoch=self._epoch, generators=committed, seconds=self._last_seconds
                )
            )

    def _form(self, receivers: list[Member]) -> Communicator:
        """The communicator of exactly these receivers: the last round's, or that of a new epoch."""
        key = [(member.name, member.incarnation) for member in receivers]
        if self._group is not None and self._group[0] == key:
            return self._group[1]
        self._drop_group()
        self._epoch += 1
        weights = self._config.weights
        store = open_store(weights.store_host, deadline_s=weights.join_deadline_s)
        world_size = 1 + sum(member.join.num_workers for member in receivers)
        rank = 1
        for member in receivers:
            group = WeightGroup(
                epoch=self._epoch,
                transport=member.transport,
                store_host=weights.store_host,
                store_port=store.port,
                first_rank=rank,
                world_size=world_size,
                deadline_s=weights.join_deadline_s,
            )
            self._server.send(member.name, group)
            rank += member.join.num_workers
        joining = in_thread(
            "weight-join",
            lambda: connect(
                receivers[0].transport,
                store_host=weights.store_host,
                store_port=store.port,
                rank=0,
                world_size=world_size,
                deadline_s=weights.join_deadline_s,
                device=_own_device(),
                store=store,
            ),
        )
        self._await(receivers, "joined", None, joining, weights.join_deadline_s)
        self._group = (key, joining.result())
        return self._group[1]

    def _offer(self, snapshot: Snapshot, *, path: str = "") -> WeightOffer:
        with snapshot.reading():
            specs = snapshot.specs()
        return WeightOffer(
            epoch=self._epoch,
            policy_version=snapshot.policy_version,
            tensors=specs,
            buckets=plan_buckets(specs, bucket_bytes=self._config.weights.bucket_mb << 20),
            deadline_s=self._config.weights.deadline_s,
            path=path,
        )

    def _tell(self, receivers: list[Member], offer: WeightOffer) -> None:
        for member in receivers:
            self._server.send(member.name, offer)

    # ------------------------------------------------------------ waiting

    def _await(
        self, receivers: list[Member], phase: str, version: int | None, work: "Future[Any] | None", deadline_s: float
    ) -> None:
        """Serves until every receiver reports `phase` and our own work is done.

        Raises:
            TransportFailed: naming who failed, left or said nothing by the deadline (the latter are fenced).
        """
        deadline = time.monotonic() + deadline_s
        while True:
            self._serve(_TURN_S)
            epoch = self._epoch
            failed = [member for member in receivers if member.failed(epoch)]
            left = [member for member in receivers if self._membership.members.get(member.name) is not member]
            late = [member for member in receivers if not member.reached(phase, epoch, version)]
            work_failed = work is not None and work.done() and work.exception() is not None
            if failed or left:
                reasons = [f"{member.name}: {member.last_error}" for member in failed]
                raise TransportFailed("; ".join(reasons + [f"{member.name} left" for member in left]))
            if work is not None and work_failed:
                raise TransportFailed(str(work.exception()))
            if not late and (work is None or work.done()):
                return
            if time.monotonic() > deadline:
                for member in late:
                    self._fence(member, f"not {phase} within {deadline_s:g} s")
                names = ", ".join(member.name for member in late) or "the publisher's own end"
                raise TransportFailed(f"{names} not {phase} within {deadline_s:g} s")
            if self._closing:
                raise TransportFailed("the publisher is closing")

    def _hear_out(self, receivers: list[Member]) -> None:
        """After a failure: gives the others a moment to report theirs, which tells the living from the silent."""
        deadline = time.monotonic() + _HEAR_OUT_S
        while time.monotonic() < deadline and not self._closing:
            if all(member.failed(self._epoch) or member.held == self._membership.target for member in receivers):
                return
            self._serve(_TURN_S)

    def _heard_lately(self, name: str) -> bool:
        peer = self._server.peer(name)
        return peer is not None and time.monotonic() - peer.last_heard < 2.5 * self._config.transport.heartbeat_s

    def _off_loop(self, function: Callable[[], T]) -> T:
        """Runs a function that takes a while in a thread, serving the control socket meanwhile."""
        future = in_thread("weight-work", function)
        while not future.done():
            self._serve(_TURN_S)
        return future.result()

    def _fence(self, member: Member, reason: str) -> None:
        member.last_error = reason
        self._membership.remove(member.name, member.incarnation)
        event(log, logging.WARNING, "weight group member fenced", member=member.name, reason=reason)
        self._server.send(member.name, Refused(code="fenced", reason=f"{reason}: join again"))

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group[1].abort()

    # ------------------------------------------------------------ the control socket

    def _serve(self, timeout_s: float) -> None:
        for received in self._server.poll(timeout_s, extra=[self._wake]):
            self._handle(received)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for peer in self._server.gone():
            self._membership.remove(peer.name, peer.incarnation)

    def _handle(self, received: Received) -> None:
        peer, body = received.peer, received.body
        answer: Ack | Refused | HeartbeatAck = Ack()
        if isinstance(body, Heartbeat):
            target = -1 if self._membership.target is None else self._membership.target
            answer = HeartbeatAck(policy_version=target, published_version=target)
        elif isinstance(body, WeightJoin):
            answer = self._admit(received, body)
        elif isinstance(body, WeightStatus):
            self._membership.record(peer.name, peer.incarnation, body)
        else:
            answer = Refused(code="unexpected", reason=f"the weight publisher takes no {type(body).__name__}")
        self._server.send(peer, answer, reply_to=received.envelope.msg_id)

    def _admit(self, received: Received, join: WeightJoin) -> Ack | Refused:
        wanted = self._config.weights.transport
        transport = choose_transport(join, wanted=wanted, own_device_uuid=_own_device_uuid())
        if transport is None:
            return Refused(
                code="no_transport",
                reason=f"weights.transport = {wanted} is not among this generator's: {', '.join(join.transports)}",
            )
        peer = received.peer
        self._membership.add(peer.name, peer.incarnation, join, transport=transport)
        event(log, logging.INFO, "weight group member joins", member=peer.name, transport=transport)
        return Ack(detail=transport)

    def _accept(self, hello: Hello) -> Welcome | Refused:
        if hello.role not in ("generator", "client"):
            return Refused(code="role", reason=f"the weight publisher serves generators, not a {hello.role}")
        target = -1 if self._membership.target is None else self._membership.target
        return Welcome(
            server="weights",
            incarnation=self._incarnation,
            run_id=self._config.run.name,
            policy_version=target,
            published_version=target,
        )


def _own_device() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _own_device_uuid() -> str:
    device = _own_device()
    return str(torch.cuda.get_device_properties(device).uuid) if device is not None else ""
