"""One sink behind a bounded queue and a thread: whatever it does, giving it a record takes no time.

    offered -> queued -> written
       |         |-----> dropped: the sink raised
       |---------------> dropped: the queue was full (the sink is slow, blocks, or cannot be made)

A sink that cannot be made is tried again after FIRST_RETRY_S, then twice as long each time, up to LAST_RETRY_S; its
records wait in the queue. Each kind of trouble is logged once, and how many records were lost at the end.
"""

import logging
import queue
import threading
from collections.abc import Callable
from time import monotonic

from learner.sinks.base import MetricSink, SinkContext, SinkRecord
from protocol.logs import event

log = logging.getLogger(__name__)

Factory = Callable[[SinkContext], MetricSink]
FIRST_RETRY_S = 10.0
LAST_RETRY_S = 600.0
LOOK_S = 0.5


class Outlet:
    """Takes records for one sink.

    Args:
        factory: makes the sink, on this outlet's thread.
        queue_records: records held at most.
        first_retry_s: until a sink that could not be made is tried again.
    """

    def __init__(
        self,
        name: str,
        factory: Factory,
        context: SinkContext,
        *,
        queue_records: int,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self.name = name
        self.num_written = 0
        self.num_failed = 0
        self.num_overflowed = 0
        self._factory = factory
        self._context = context
        self._first_retry_s = first_retry_s
        self._queue: queue.Queue[SinkRecord] = queue.Queue(queue_records)
        self._closing = threading.Event()
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Records that the sink will never have."""
        return self.num_failed + self.num_overflowed

    def offer(self, record: SinkRecord) -> None:
        """Queues a record, or drops it when there is no room; never waits, never raises."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.num_overflowed += 1
            self._say("drops", "its queue is full (sinks.queue_records): it is slow, blocks, or cannot be reached")

    def close(self, *, deadline_s: float) -> None:
        """Lets the sink write what is queued until the deadline; then leaves it to its thread."""
        self._closing.set()
        self._thread.join(max(0.0, deadline_s))
        lost = self.num_dropped + self._queue.qsize()
        if self._thread.is_alive():
            event(log, logging.WARNING, "metric sink left behind", sink=self.name, reason="it does not end", lost=lost)
        elif lost:
            event(log, logging.WARNING, "metric sink lost records", sink=self.name, lost=lost)

    # ------------------------------------------------------------ its thread

    def _run(self) -> None:
        sink = self._make()
        while sink is not None:
            try:
                record = self._queue.get(timeout=LOOK_S if not self._closing.is_set() else 0.001)
            except queue.Empty:
                if self._closing.is_set():
                    break
                continue
            try:
                sink.write(record)
                self.num_written += 1
            except Exception as error:
                self.num_failed += 1
                self._say("write", f"a record was not taken: {type(error).__name__}: {error}")
        if sink is not None:
            try:
                sink.close()
            except Exception as error:
                self._say("close", f"it did not close: {type(error).__name__}: {error}")

    def _make(self) -> MetricSink | None:
        """The sink, however long it takes; None when the run ends before."""
        wait_s = self._first_retry_s
        while True:
            try:
                return self._factory(self._context)
            except Exception as error:
                self._say("start", f"it cannot be started, trying again: {type(error).__name__}: {error}")
            until = monotonic() + wait_s
            while monotonic() < until:
                if self._closing.wait(min(LOOK_S, wait_s)):
                    return None
            wait_s = min(2 * wait_s, LAST_RETRY_S)

    def _say(self, what: str, reason: str) -> None:
        if what not in self._said:
            self._said.add(what)
            event(log, logging.WARNING, "metric sink in trouble", sink=self.name, reason=" ".join(reason.split()))
