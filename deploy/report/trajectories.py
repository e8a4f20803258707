"""trajectories.parquet: every trained answer that the journal still holds, with its tokens, log-probs and versions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from learner.coordinator.journal import Journal, Location
from learner.coordinator.records import Answer
from learner.coordinator.schema import open_database

_QUERY = """
SELECT g.group_id, t.slot, g.prompt_id, g.batch_id, g.state, t.segment, t.offset, t.facts
FROM groups g JOIN trajectories t ON t.group_id = g.group_id
WHERE g.purpose = 'train' ORDER BY g.batch_id, g.group_id, t.slot
"""
CHUNK = 512


def read_trajectories(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Rows of the finished run's journal; the coordinator must not be running."""
    folder = run_dir / "coordinator"
    decoder = msgspec.msgpack.Decoder(Answer)
    connection = open_database(folder / "ledger.sqlite", read_only=True)
    journal = Journal(folder / "segments", segment_bytes=1 << 30)
    try:
        for group_id, slot, prompt_id, batch_id, state, segment, offset, facts in connection.execute(_QUERY):
            answer = decoder.decode(facts)
            arrays = journal.read(Location(segment, offset))
            yield {
                "batch_id": batch_id,
                "group_id": group_id,
                "slot": slot,
                "prompt_id": prompt_id,
                "state": state,
                "score": answer.score,
                "verdict": answer.verdict,
                "finish_reason": answer.finish_reason,
                "temperature": answer.temperature,
                "generator": answer.generator,
                "min_version": answer.min_version,
                "max_version": answer.max_version,
                "num_prompt_tokens": answer.num_prompt_tokens,
                "num_response_tokens": answer.num_response_tokens,
                **{name: array.tolist() for name, array in arrays.items()},
            }
    finally:
        journal.close()
        connection.close()


def write_trajectories(run_dir: Path, path: Path) -> int:
    """Write all rows to a parquet file, chunk by chunk; returns their number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer: pq.ParquetWriter | None = None
    written = 0
    chunk: list[dict[str, Any]] = []

    def flush() -> None:
        nonlocal writer, written
        table = pa.Table.from_pylist(chunk, schema=writer.schema if writer is not None else None)
        if writer is None:
            writer = pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
        written += len(chunk)
        chunk.clear()

    try:
        for row in read_trajectories(run_dir):
            chunk.append(row)
            if len(chunk) >= CHUNK:
                flush()
        if chunk:
            flush()
    finally:
        if writer is not None:
            writer.close()
    return written


def sample_answers(run_dir: Path, *, tokenizer_folder: Path, count: int = 12) -> list[dict[str, Any]]:
    """A few answers as text, evenly over the run."""
    from transformers import PreTrainedTokenizerFast

    rows = list(read_trajectories(run_dir))
    chosen = rows[:: max(1, len(rows) // count)][:count]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    return [
        {
            "policy_version": row["max_version"],
            "prompt": tokenizer.decode(row["token_ids"][: row["num_prompt_tokens"]], skip_special_tokens=True).strip(),
            "response": tokenizer.decode(row["token_ids"][row["num_prompt_tokens"] :]),
            "score": row["score"],
            "verdict": row["verdict"],
        }
        for row in chosen
    ]
