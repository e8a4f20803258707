"""Asking the ledger of a run that goes on; the queries of docs/operations.md, as they stand there."""

from pathlib import Path
from typing import Any

from learner.coordinator.schema import open_database

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def documented_query(question: str) -> str:
    """The SQL of the first code block after the words `question`."""
    text = OPERATIONS.read_text()
    assert text.count(question) == 1, f"{OPERATIONS} asks {question!r} {text.count(question)} times"
    return text.split(question)[1].split("```sql\n")[1].split("```")[0]


TRAINED_AGES = documented_query("How old were the tokens that each batch trained?")
TRAINED_TWICE = documented_query("Which answers are in two batches?")
SAMPLED_AGES = documented_query("By which versions were a batch's answers sampled")


def query(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    """Rows of a run's ledger."""
    database = open_database(run_dir / "coordinator" / "ledger.sqlite", read_only=True)
    try:
        return database.execute(sql).fetchall()
    finally:
        database.close()


def num_trained_batches(run_dir: Path) -> int:
    """Batches counted as trained; 0 while there is no ledger."""
    path = run_dir / "coordinator" / "ledger.sqlite"
    if not path.is_file() or not query(run_dir, "SELECT 1 FROM sqlite_master WHERE name = 'batches'"):
        return 0
    return int(query(run_dir, "SELECT COUNT(*) FROM batches WHERE state = 'trained'")[0][0])
