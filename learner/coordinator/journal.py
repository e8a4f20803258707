"""Append-only segment files for the token arrays of trajectories.

A record is `magic, length, crc32, header length` (four little-endian uint32), a MessagePack header that describes the
arrays, and their raw bytes. Records are written with one `write`, made durable by `sync` (the caller commits the
database rows that point at them only after that), and checked by their crc when read. A torn record at the end of the
newest segment, left by a crash, is cut off when the journal is opened.
"""

import logging
import os
import struct
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.messages import ArraySpec

log = logging.getLogger(__name__)

_PREFIX = struct.Struct("<4sIII")
_MAGIC = b"SLJ1"
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[ArraySpec])

Arrays = Mapping[str, NDArray[np.generic]]


class Location(NamedTuple):
    """Where a record begins."""

    segment: int
    offset: int


class JournalDamaged(RuntimeError):
    """A record that the ledger points at is missing or fails its crc."""


class Journal:
    """Writes and reads records of named arrays.

    Args:
        folder: holds `%08d.seg` files; created when absent.
        segment_bytes: a new segment is begun once the current one is at least this large.
    """

    def __init__(self, folder: Path, *, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        folder.mkdir(parents=True, exist_ok=True)
        existing = self.segments()
        self._segment = existing[-1] if existing else 0
        if existing:
            _cut_torn_tail(self._path(self._segment))
        self._fd = self._open_segment(self._segment)
        self._size = os.fstat(self._fd).st_size
        self._dirty = False
        self._readers: dict[int, int] = {}

    @property
    def active_segment(self) -> int:
        """The segment that is written to."""
        return self._segment

    def segments(self) -> list[int]:
        """Numbers of the segments on disk, ascending."""
        return sorted(int(path.stem) for path in self._folder.glob("*.seg"))

    def num_bytes(self) -> int:
        """Bytes of all segments on disk."""
        return sum(path.stat().st_size for path in self._folder.glob("*.seg"))

    def append(self, arrays: Arrays) -> Location:
        """Writes one record. It is durable only after the next `sync`."""
        if self._size >= self._segment_bytes:
            self._next_segment()
        specs = [ArraySpec(name, array.dtype.str, array.shape) for name, array in arrays.items()]
        header = _encoder.encode(specs)
        parts: list[bytes | memoryview] = [header]
        parts += [
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values() if array.size
        ]
        crc = 0
        length = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
            length += len(part)
        location = Location(self._segment, self._size)
        _write_all(self._fd, [_PREFIX.pack(_MAGIC, length, crc, len(header)), *parts])
        self._size += _PREFIX.size + length
        self._dirty = True
        return location

    def sync(self) -> None:
        """Makes everything appended so far durable."""
        if self._dirty:
            os.fdatasync(self._fd)
            self._dirty = False

    def read(self, location: Location) -> dict[str, NDArray[np.generic]]:
        """The arrays of a record. Raises JournalDamaged when it is not whole."""
        try:
            fd = self._reader(location.segment)
            magic, length, crc, header_length = _PREFIX.unpack(os.pread(fd, _PREFIX.size, location.offset))
            body = os.pread(fd, length, location.offset + _PREFIX.size)
        except (OSError, struct.error) as error:
            raise JournalDamaged(f"record {location} of {self._folder} cannot be read: {error}") from error
        if magic != _MAGIC or len(body) != length or zlib.crc32(body) != crc:
            raise JournalDamaged(f"record {location} of {self._folder} fails its checksum")
        arrays: dict[str, NDArray[np.generic]] = {}
        offset = header_length
        for spec in _decoder.decode(body[:header_length]):
            count = int(np.prod(spec.shape, dtype=np.int64))
            array = np.frombuffer(body, dtype=spec.dtype, count=count, offset=offset)
            arrays[spec.name] = array.reshape(spec.shape)
            offset += array.nbytes
        return arrays

    def delete_except(self, needed: Collection[int]) -> list[int]:
        """Deletes all segments that are not in `needed`, except the one being written."""
        deleted = [number for number in self.segments() if number not in needed and number != self._segment]
        for number in deleted:
            reader = self._readers.pop(number, None)
            if reader is not None:
                os.close(reader)
            self._path(number).unlink()
        return deleted

    def close(self) -> None:
        """Makes everything durable and closes all files."""
        self.sync()
        for fd in (self._fd, *self._readers.values()):
            os.close(fd)
        self._readers.clear()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.seg"

    def _open_segment(self, number: int) -> int:
        fd = os.open(self._path(number), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        return fd

    def _next_segment(self) -> None:
        self.sync()
        os.close(self._fd)
        self._segment += 1
        self._fd = self._open_segment(self._segment)
        self._size = 0

    def _reader(self, number: int) -> int:
        if number not in self._readers:
            if len(self._readers) >= 16:
                os.close(self._readers.pop(next(iter(self._readers))))
            self._readers[number] = os.open(self._path(number), os.O_RDONLY)
        return self._readers[number]


def _write_all(fd: int, parts: list[bytes | memoryview]) -> None:
    expected = sum(len(part) for part in parts)
    written = os.writev(fd, parts)
    if written < expected:  # a nearly full disk or a signal: write the rest plainly
        rest = memoryview(b"".join(parts))[written:]
        while rest:
            rest = rest[os.write(fd, rest) :]


def _cut_torn_tail(path: Path) -> None:
    """Cuts the file after its last whole record."""
    size = path.stat().st_size
    good = 0
    with path.open("rb+") as file:
        while good + _PREFIX.size <= size:
            file.seek(good)
            magic, length, crc, _ = _PREFIX.unpack(file.read(_PREFIX.size))
            if magic != _MAGIC or good + _PREFIX.size + length > size or zlib.crc32(file.read(length)) != crc:
                break
            good += _PREFIX.size + length
        if good < size:
            log.warning("cut a torn record off the journal: file=%s bytes=%d", path, size - good)
            file.truncate(good)
            file.flush()
            os.fsync(file.fileno())
