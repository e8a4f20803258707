"""Statements of the coordinator's database, gathered into one transaction per group commit."""

import json
import sqlite3
from collections import Counter
from typing import Any

import msgspec

from learner.coordinator.journal import Location
from learner.coordinator.records import Answer, EndState, Group, Partial, Slot

_answer_encoder = msgspec.msgpack.Encoder()
_answer_decoder = msgspec.msgpack.Decoder(Answer)


class Store:
    """Write side of the ledger. Nothing is visible to a new process before `commit`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._open = False
        self._added: Counter[str] = Counter()
        self._meta: dict[str, str] = dict(connection.execute("SELECT key, value FROM meta"))
        self._dirty_meta: dict[str, str] = {}
        self._counters: Counter[str] = Counter(dict(connection.execute("SELECT name, value FROM counters")))

    # ------------------------------------------------------------ transactions

    @property
    def dirty(self) -> bool:
        """Whether `commit` has anything to make durable."""
        return self._open or bool(self._added) or bool(self._dirty_meta)

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Runs a statement inside the current transaction."""
        if not self._open:
            self.connection.execute("BEGIN IMMEDIATE")
            self._open = True
        return self.connection.execute(sql, values)

    def commit(self) -> None:
        """Makes everything since the last commit durable."""
        for name, value in self._added.items():
            self.execute(
                "INSERT INTO counters VALUES (?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
                (name, value),
            )
        for key, text in self._dirty_meta.items():
            self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, text))
        self._added.clear()
        self._dirty_meta.clear()
        if self._open:
            self.connection.execute("COMMIT")
            self._open = False

    # ------------------------------------------------------------ counters and facts of the run

    def count(self, name: str, value: int = 1) -> None:
        """Adds to a counter that survives restarts."""
        self._added[name] += value
        self._counters[name] += value

    @property
    def counters(self) -> Counter[str]:
        """All counters, including what is not committed yet."""
        return self._counters

    def get(self, key: str, default: Any = None) -> Any:
        """A fact of the run (JSON value)."""
        text = self._meta.get(key)
        return default if text is None else json.loads(text)

    def put(self, key: str, value: Any) -> None:
        """Sets a fact of the run."""
        text = json.dumps(value)
        if self._meta.get(key) != text:
            self._meta[key] = self._dirty_meta[key] = text

    # ------------------------------------------------------------ groups and slots

    def insert_group(self, group: Group) -> None:
        self.execute(
            "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'in_flight', '', NULL, ?)",
            (
                group.group_id,
                group.purpose,
                group.prompt_id,
                group.pass_number,
                group.position,
                len(group.slots),
                group.stage,
                group.variant,
                group.created,
            ),
        )
        for slot in group.slots:
            self.execute(
                "INSERT INTO slots (group_id, slot, purpose, state) VALUES (?, ?, ?, 'open')",
                (group.group_id, slot.slot, group.purpose),
            )

    def update_slot(self, slot: Slot) -> None:
        self.execute(
            "UPDATE slots SET state = ?, attempt = ?, failures = ?, holder = ?, version = ? "
            "WHERE group_id = ? AND slot = ?",
            (slot.state, slot.attempt, slot.failures, slot.holder, slot.version, slot.group_id, slot.slot),
        )

    def insert_answer(self, slot: Slot, answer: Answer, location: Location) -> None:
        self.execute(
            "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?)",
            (slot.group_id, slot.slot, location.segment, location.offset, _answer_encoder.encode(answer)),
        )
        if slot.partial is not None:
            self.execute("DELETE FROM partials WHERE group_id = ? AND slot = ?", (slot.group_id, slot.slot))

    def put_partial(self, slot: Slot, partial: Partial) -> None:
        self.execute(
            "INSERT OR REPLACE INTO partials VALUES (?, ?, ?, ?, ?, ?)",
            (slot.group_id, slot.slot, *partial.location, partial.num_tokens, partial.version),
        )

    def end_group(self, group: Group, state: EndState, reason: str) -> None:
        self.execute("UPDATE groups SET state = ?, reason = ? WHERE group_id = ?", (state, reason, group.group_id))
        self.execute("UPDATE slots SET state = ?, holder = '' WHERE group_id = ?", (state, group.group_id))
        if any(slot.partial is not None for slot in group.slots):
            self.execute("DELETE FROM partials WHERE group_id = ?", (group.group_id,))

    def set_batch(self, group: Group) -> None:
        self.execute("UPDATE groups SET batch_id = ? WHERE group_id = ?", (group.batch_id, group.group_id))

    # ------------------------------------------------------------ reading back

    def load_groups(self) -> list[Group]:
        """All groups in flight, in lease order."""
        groups: dict[int, Group] = {}
        rows = self.connection.execute(
            "SELECT group_id, purpose, prompt_id, pass, position, stage, variant, created, batch_id FROM groups "
            "WHERE state = 'in_flight' ORDER BY group_id"
        )
        for group_id, purpose, prompt_id, pass_number, position, stage, variant, created, batch_id in rows:
            groups[group_id] = Group(
                group_id, purpose, prompt_id, pass_number, position, stage, variant, created, batch_id=batch_id
            )
        for group in groups.values():
            self._load_slots(group)
        return list(groups.values())

    def _load_slots(self, group: Group) -> None:
        rows = self.connection.execute(
            "SELECT s.slot, s.state, s.attempt, s.failures, s.holder, s.version, t.segment, t.offset, t.facts, "
            "p.segment, p.offset, p.num_tokens, p.version FROM slots s "
            "LEFT JOIN trajectories t ON t.group_id = s.group_id AND t.slot = s.slot "
            "LEFT JOIN partials p ON p.group_id = s.group_id AND p.slot = s.slot "
            "WHERE s.group_id = ? ORDER BY s.slot",
            (group.group_id,),
        )
        for number, state, attempt, failures, holder, version, segment, offset, facts, *partial in rows:
            slot = Slot(group.group_id, number, state, attempt, failures, holder, version=version)
            if facts is not None:
                slot.answer = _answer_decoder.decode(facts)
                slot.location = Location(segment, offset)
            if partial[0] is not None:
                slot.partial = Partial(Location(partial[0], partial[1]), partial[2], partial[3])
            group.slots.append(slot)
        group.num_answered = sum(slot.state == "answered" for slot in group.slots)

    def location(self, group_id: int, slot: int) -> Location | None:
        """Where the arrays of an answer are; None once they were deleted."""
        row = self.connection.execute(
            "SELECT segment, offset FROM trajectories WHERE group_id = ? AND slot = ?", (group_id, slot)
        ).fetchone()
        return None if row is None else Location(*row)

    def slot_state(self, group_id: int, slot: int) -> str | None:
        """The state of any slot ever issued; None for an unknown one."""
        row = self.connection.execute(
            "SELECT state FROM slots WHERE group_id = ? AND slot = ?", (group_id, slot)
        ).fetchone()
        return None if row is None else str(row[0])
