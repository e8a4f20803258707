"""The prompt ledger: every group and slot from issue to its end, with the strength of a database.

Life of a slot::

    open -> leased -> answered -> trained | filtered          (with its whole group)
      ^        |
      +--------+  lease expired, handed back (with tokens), generator gone, or answer not judged
    any of open, leased, answered -> retired | quarantined    (with its whole group)

Memory holds only groups in flight; every change is written to the store's current transaction first. Conservation
(design.md, invariant 4) is counted per slot: issued = trained + filtered + retired + quarantined + in flight.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from learner.coordinator.journal import Location
from learner.coordinator.records import Answer, EndState, Group, Partial, Slot, Variant
from learner.coordinator.schema import ledger_summary
from learner.coordinator.store import Store
from protocol.messages import Purpose, SlotRef

_PRIORITY = {"train": 0, "eval": 1}


class Ledger:
    """Groups in flight, by purpose and in lease order; `num_batched` of the training groups are in a planned batch.

    Args:
        store: the database; its transaction is committed by the caller.
        max_attempts: failed attempts at a slot before its group is retired.
        max_prompt_failures: failed groups of a prompt before it is quarantined.
        lease_deadline_s: how long a slot may wait for a lease before its group stops holding back younger ones.
    """

    def __init__(
        self, store: Store, *, now: float, max_attempts: int, max_prompt_failures: int, lease_deadline_s: float
    ) -> None:
        self._store = store
        self._max_attempts = max_attempts
        self._max_prompt_failures = max_prompt_failures
        self._lease_deadline_s = lease_deadline_s
        self.train: dict[int, Group] = {}
        self.eval: dict[int, Group] = {}
        self.held: defaultdict[str, dict[tuple[int, int], Slot]] = defaultdict(dict)
        self.cancelled: defaultdict[str, list[SlotRef]] = defaultdict(list)
        self.ended: Counter[str] = Counter()
        self._open: list[tuple[int, int, int]] = []  # heap of (priority, group, slot); stale entries are skipped
        self._queued: set[tuple[int, int]] = set()  # (group, slot) of its entries, at most one for a slot
        self._failures: dict[str, int] = {}
        self._quarantined: set[str] = set()
        self.num_batched = 0
        self._last_group = self._load(now)

    def _load(self, now: float) -> int:
        for group in self._store.load_groups():
            self._live(group)[group.group_id] = group
            self.num_batched += group.batch_id is not None
            for slot in group.slots:
                if slot.state == "open":
                    self._push_open(group, slot)
                    slot.deadline = now + self._lease_deadline_s
                elif slot.state == "leased":
                    self.held[slot.holder][group.group_id, slot.slot] = slot
                    slot.deadline = slot.last_deadline = now + self._lease_deadline_s
        query = "SELECT prompt_id, failures, quarantined FROM prompts WHERE failures > 0 OR quarantined"
        for prompt_id, failures, quarantined in self._store.connection.execute(query):
            self._failures[prompt_id] = failures
            if quarantined:
                self._quarantined.add(prompt_id)
        ended = (  # of groups, which are an order of magnitude fewer than slots: 10 million slots take seconds to read
            "SELECT state, SUM(num_slots) FROM groups WHERE purpose = 'train' AND state != 'in_flight' GROUP BY state"
        )
        self.ended.update(dict(self._store.connection.execute(ended).fetchall()))
        return int(self._store.connection.execute("SELECT COALESCE(MAX(group_id), 0) FROM groups").fetchone()[0])

    # ------------------------------------------------------------ reading

    def group(self, group_id: int) -> Group | None:
        """A group in flight."""
        return self.train.get(group_id) or self.eval.get(group_id)

    def is_quarantined(self, prompt_id: str) -> bool:
        return prompt_id in self._quarantined

    def open_slots(self) -> Iterator[tuple[Group, Slot]]:
        """Takes open slots, training before evaluation and oldest first; put those not leased back with `put_back`."""
        while self._open:
            _, group_id, number = heapq.heappop(self._open)
            self._queued.discard((group_id, number))
            group = self.group(group_id)
            if group is not None and group.slots[number].state == "open":
                yield group, group.slots[number]

    def put_back(self, skipped: Iterable[tuple[Group, Slot]]) -> None:
        """Returns slots taken from `open_slots` that were not leased."""
        for group, slot in skipped:
            self._push_open(group, slot)

    def leased(self) -> Iterator[Slot]:
        """All slots under lease."""
        for slots in self.held.values():
            yield from slots.values()

    def summary(self) -> dict[str, int]:
        """The conservation equation from memory, for live status (`ledger_summary` asks the database)."""
        in_flight = sum(len(group.slots) for group in self.train.values())
        states = ("trained", "filtered", "retired", "quarantined")
        summary = {"issued": self._store.counters["issued"], **{s: self.ended[s] for s in states}}
        return summary | {"reissued": self._store.counters["reissued"], "in_flight": in_flight}

    def database_summary(self) -> dict[str, int | bool]:
        """The conservation equation as the one SQL query."""
        return ledger_summary(self._store.connection)

    # ------------------------------------------------------------ transitions

    def issue(
        self,
        prompt_id: str,
        *,
        num_slots: int,
        pass_number: int,
        position: int,
        now: float,
        stage: int = 0,
        purpose: Purpose = "train",
        variant: Variant = "sampled",
    ) -> Group:
        """Draws a prompt: a new group whose slots are all open."""
        self._last_group += 1
        group = Group(self._last_group, purpose, prompt_id, pass_number, position, stage, variant, created=now)
        group.slots = [Slot(group.group_id, i, deadline=now + self._lease_deadline_s) for i in range(num_slots)]
        self._live(group)[group.group_id] = group
        self._store.insert_group(group)
        if purpose == "train":
            self._store.count("issued", num_slots)
        for slot in group.slots:
            self._push_open(group, slot)
        return group

    def lease(self, slot: Slot, *, holder: str, version: int, deadline: float, last_deadline: float) -> None:
        """Gives an open slot to a generator: a new attempt."""
        assert slot.state == "open"
        if slot.attempt > 0 and slot.group_id in self.train:
            self._store.count("reissued")
        slot.state = "leased"
        slot.attempt += 1
        slot.holder = holder
        slot.version = min(version, slot.partial.version) if slot.partial is not None else version
        slot.deadline, slot.last_deadline = deadline, last_deadline
        slot.num_tokens = slot.partial.num_tokens if slot.partial is not None else 0
        slot.recalled = False
        self.held[holder][slot.group_id, slot.slot] = slot
        self._store.update_slot(slot)

    def release(
        self, slot: Slot, *, now: float, failed: str = "", partial: Partial | None = None, cancel: bool = True
    ) -> EndState | None:
        """Ends a lease without an answer. `failed` is the reason when the attempt counts against the slot.

        Returns "retired" or "quarantined" when that was the last attempt, else None: the slot is open again.
        """
        assert slot.state == "leased"
        if cancel:
            self._cancel(slot)
        self._unhold(slot)
        slot.state = "open"
        slot.deadline = now + self._lease_deadline_s
        slot.recalled = False
        if partial is not None:
            self.keep_partial(slot, partial)
        else:
            slot.version = slot.partial.version if slot.partial is not None else -1
        group = self.group(slot.group_id)
        assert group is not None
        if failed:
            slot.failures += 1
            self._store.count(f"failed_attempts/{failed}")
            if slot.failures >= self._max_attempts:
                self._store.update_slot(slot)
                reason = f"{slot.failures} failed attempts at slot {slot.slot}, last: {failed}"
                return self.fail(group, reason, blame_prompt=failed != "unjudged")
        self._store.update_slot(slot)
        self._push_open(group, slot)
        return None

    def keep_partial(self, slot: Slot, partial: Partial) -> None:
        """Keeps tokens for the next attempt, unless more are held already."""
        if slot.partial is None or partial.num_tokens > slot.partial.num_tokens:
            slot.partial = partial
            self._store.put_partial(slot, partial)
        slot.version = slot.partial.version

    def answer(self, slot: Slot, answer: Answer, location: Location) -> Group:
        """Records the one answer of a slot that counts, whichever attempt made it."""
        assert slot.state in ("open", "leased")
        self._store.insert_answer(slot, answer, location)
        self._unhold(slot)
        slot.state = "answered"
        slot.answer, slot.location, slot.partial = answer, location, None
        slot.version = answer.min_version
        group = self.group(slot.group_id)
        assert group is not None
        group.num_answered += 1
        self._store.update_slot(slot)
        return group

    def end(self, group: Group, state: EndState, reason: str = "") -> None:
        """Ends a group with all its slots; leases of it are cancelled."""
        for slot in group.slots:
            if slot.state == "leased":
                self._cancel(slot)
                self._unhold(slot)
        del self._live(group)[group.group_id]
        self.num_batched -= group.batch_id is not None
        self._store.end_group(group, state, reason)
        if group.purpose == "train":
            self.ended[state] += len(group.slots)

    def fail(self, group: Group, reason: str, *, blame_prompt: bool = True) -> EndState:
        """Ends a group that can't be completed; after `max_prompt_failures` of these its prompt is quarantined.

        `blame_prompt` is False when the fault is known to be ours (the reward infrastructure).
        """
        if group.purpose == "eval" or not blame_prompt:
            self.end(group, "retired", reason)
            return "retired"
        failures = self._failures.get(group.prompt_id, 0) + 1
        self._failures[group.prompt_id] = failures
        quarantined = failures >= self._max_prompt_failures
        if quarantined:
            self._quarantined.add(group.prompt_id)
        self._store.execute(
            "INSERT INTO prompts (prompt_id, failures, quarantined) VALUES (?, ?, ?) ON CONFLICT DO UPDATE "
            "SET failures = excluded.failures, quarantined = excluded.quarantined",
            (group.prompt_id, failures, int(quarantined)),
        )
        state: EndState = "quarantined" if quarantined else "retired"
        self.end(group, state, reason)
        return state

    def put_in_batch(self, group: Group, batch_id: int) -> None:
        """Marks a complete group as planned in a batch."""
        assert group.complete and group.batch_id is None
        group.batch_id = batch_id
        self.num_batched += 1
        self._store.set_batch(group)

    # ------------------------------------------------------------ helpers

    def _live(self, group: Group) -> dict[int, Group]:
        return self.train if group.purpose == "train" else self.eval

    def _push_open(self, group: Group, slot: Slot) -> None:
        if (group.group_id, slot.slot) not in self._queued:
            self._queued.add((group.group_id, slot.slot))
            heapq.heappush(self._open, (_PRIORITY[group.purpose], group.group_id, slot.slot))

    def _unhold(self, slot: Slot) -> None:
        if slot.holder:
            held = self.held[slot.holder]
            held.pop((slot.group_id, slot.slot), None)
            if not held:
                del self.held[slot.holder]
        slot.holder = ""

    def _cancel(self, slot: Slot) -> None:
        self.cancelled[slot.holder].append(SlotRef(group_id=slot.group_id, slot=slot.slot, attempt=slot.attempt))

    def cancel_lease(self, slot: Slot) -> None:
        """Tells the holder of a lease, in the next heartbeat, to stop working on it."""
        self._cancel(slot)
