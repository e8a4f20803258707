"""Rows of a data file as plain dictionaries: Parquet, JSON lines, and pickled frames read without running code."""

import gzip
import importlib.util
import io
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from protocol.errors import UserError

Row = dict[str, Any]

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
REQUIRED_COLUMNS = ("prompt", "reward_model")
SUFFIXES = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".pkl", ".pickle")


@dataclass(frozen=True)
class Table:
    """The columns that are read, and those that must be there."""

    columns: tuple[str, ...]
    required: tuple[str, ...]


PROMPTS = Table(columns=COLUMNS, required=REQUIRED_COLUMNS)
CONVERSATIONS = Table(columns=("messages",), required=("messages",))


def read_rows(address: str, *, table: Table = PROMPTS) -> Iterator[Row]:
    """Yields the rows of a file, in order. `address` is a local path or any `pyarrow.fs` address (s3://, gs://, ...).

    Raises UserError, one line, when the file is missing, of an unknown kind, or damaged (with the line number).
    """
    name = address.lower()
    with _open(address) as stream:
        if name.endswith(".parquet"):
            yield from _read_parquet(stream, address, table)
        elif name.endswith(".jsonl.gz"):
            with gzip.open(stream) as inner:
                yield from _read_json_lines(inner, address, table)
        elif name.endswith((".jsonl", ".json")):
            yield from _read_json_lines(stream, address, table)
        elif name.endswith((".pkl", ".pickle")):
            yield from _read_pickle(stream, address, table)
        else:
            raise UserError(f"{address}: unknown kind of data file; expected one of {', '.join(SUFFIXES)}")


def _open(address: str) -> Any:
    from pyarrow import ArrowException, fs

    try:
        if "://" in address:
            filesystem, path = fs.FileSystem.from_uri(address)
        else:
            filesystem, path = fs.LocalFileSystem(), str(Path(address).expanduser().absolute())
        if filesystem.get_file_info(path).type != fs.FileType.File:
            raise UserError(f"data file {address} does not exist; check data.train_files and data.eval_files")
        return filesystem.open_input_file(path)
    except (OSError, ArrowException) as error:
        raise UserError(f"data file {address} cannot be opened: {_one_line(error)}") from error


def _read_parquet(stream: IO[bytes], address: str, table: Table) -> Iterator[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(stream)
        columns = [name for name in file.schema_arrow.names if name in table.columns]
        _check_columns(columns, address, table)
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{address} is not a readable Parquet file: {_one_line(error)}") from error


def _read_json_lines(stream: Any, address: str, table: Table) -> Iterator[Row]:
    text = io.TextIOWrapper(stream, encoding="utf-8")
    try:
        for number, line in enumerate(text, start=1):
            if not line.strip():
                continue
            row = json.loads(line)
            if not isinstance(row, dict):
                raise UserError(f"{address}, line {number}: a row must be a JSON object, got {type(row).__name__}")
            _check_columns(row, f"{address}, line {number}", table)
            yield row
    except (ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{address} is not a JSON-lines file: {_one_line(error)}") from error


class _DataUnpickler(pickle.Unpickler):
    """Unpickles lists and dictionaries of plain values and arrays, and pandas frames when pandas is installed.

    Everything else is refused by name, so that nothing in the file can run.
    """

    _NUMPY = frozenset({"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"})
    _PANDAS = frozenset(
        {"DataFrame", "Index", "RangeIndex", "BlockManager", "_unpickle_block", "_new_Index", "new_block"}
    )

    def find_class(self, module: str, name: str) -> Any:
        root = module.split(".")[0]
        if (root == "numpy" and name in self._NUMPY) or (module == "builtins" and name in ("slice", "complex")):
            return super().find_class(module, name)
        if root == "pandas" and name in self._PANDAS:
            if importlib.util.find_spec("pandas") is None:
                raise pickle.UnpicklingError("it holds a pandas frame and pandas is not installed; convert to Parquet")
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not plain data")


def _read_pickle(stream: IO[bytes], address: str, table: Table) -> Iterator[Row]:
    try:
        data = _DataUnpickler(io.BytesIO(stream.read())).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(f"{address} is not a pickled list of rows: {_one_line(error)}") from error
    rows = data if isinstance(data, list) else getattr(data, "to_dict", lambda _: None)("records")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{address}: expected a list of dictionaries or a frame, got {type(data).__name__}")
    for number, row in enumerate(rows, start=1):
        _check_columns(row, f"{address}, row {number}", table)
        yield row


def _check_columns(columns: Any, where: str, table: Table) -> None:
    missing = [name for name in table.required if name not in columns]
    if missing:
        raise UserError(f"{where}: column {', '.join(missing)} is missing; needed are {', '.join(table.columns)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
