"""Rows of the ledger for people: what became of a prompt, a group or a slot."""

from contextlib import closing
from pathlib import Path
from typing import Any

from learner.coordinator.schema import open_database
from protocol.errors import UserError

_QUERY = """
SELECT s.group_id, s.slot, g.prompt_id, s.purpose, s.state, g.reason, g.pass, g.position, s.attempt AS attempts,
       s.failures, s.holder, s.version, g.batch_id
FROM slots s JOIN groups g ON g.group_id = s.group_id
"""


def ledger_rows(
    path: Path, *, prompt_id: str | None = None, group_id: int | None = None, slot: int | None = None
) -> list[dict[str, Any]]:
    """Slots of a prompt or group, in order of issue, with their state, its reason, attempts and batch.

    Raises UserError when the ledger does not exist or holds no such row.
    """
    wanted = {"g.prompt_id": prompt_id, "s.group_id": group_id, "s.slot": slot}
    given = {column: value for column, value in wanted.items() if value is not None}
    conditions = " AND ".join(f"{column} = ?" for column in given) or "1"
    with closing(open_database(path, read_only=True)) as database:
        cursor = database.execute(f"{_QUERY} WHERE {conditions} ORDER BY 1, 2", tuple(given.values()))
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor]
    if not rows:
        asked = ", ".join(f"{column[2:]} {value}" for column, value in given.items())
        raise UserError(f"{path} holds no slot with {asked}: `slipstream ledger` without options counts what there is")
    return rows
