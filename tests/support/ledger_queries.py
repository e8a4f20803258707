"""The queries of docs/operations.md, as they stand there."""

from pathlib import Path

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def documented_query(question: str) -> str:
    """The SQL of the first code block after the words `question`."""
    text = OPERATIONS.read_text()
    assert text.count(question) == 1, f"{OPERATIONS} asks {question!r} {text.count(question)} times"
    return text.split(question)[1].split("```sql\n")[1].split("```")[0]


TRAINED_AGES = documented_query("How old were the tokens that each batch trained?")
TRAINED_TWICE = documented_query("Which answers are in two batches?")
SAMPLED_AGES = documented_query("By which versions were a batch's answers sampled")
