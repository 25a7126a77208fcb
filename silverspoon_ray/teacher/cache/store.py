"""Entries in files: Arrow IPC files that appear complete or not at all, and an index of their keys in memory."""

from __future__ import annotations

import atexit
import bisect
import itertools
import json
import logging
import os
import socket
import time
import uuid
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pyarrow as pa

from silverspoon_ray.errors import CacheError
from silverspoon_ray.teacher.cache.entries import Entry
from silverspoon_ray.teacher.cache.manifest import SHARD
from silverspoon_ray.teacher.cache.place import KEY, Place

logger = logging.getLogger(__name__)

FLUSH_BYTES = 64 << 20
FLUSH_S = 60.0
BATCH_BYTES = 4 << 20
REFRESH_S = 5.0
OPEN_FILES = 256
MAPPED_BATCHES = 256
MARK = b"silverspoon_ray.teacher_cache"
SPECS = b"specs"
COLUMNS = {"key": pa.binary(16), "spec": pa.int32(), "crc": pa.uint32(), "data": pa.large_binary()}


class CacheStore:
    """The entries of one cache, for one process.

    What is added is kept in memory until it is :data:`FLUSH_BYTES` or :data:`FLUSH_S` old, and then becomes a file of
    its own, under a name that no other writer has. Values are read from the files (mapped into memory where those are
    local); of each entry only its key stays in memory, about 200 bytes.

    Args:
        place: where files go; a manifest is no concern of this class.
        writes: False: nothing may be added.
    """

    def __init__(self, place: Place, writes: bool = True) -> None:
        self.place = place
        self.writes = writes
        self._index: dict[bytes, int] = {}
        self._files: list[tuple[str, list[int]]] = []  # with the first row of each of their batches
        self._known: set[str] = set()
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._pending: dict[bytes, Entry] = {}
        self._pending_bytes = 0
        self._pending_since = 0.0
        self._looked = float("-inf")
        self._numbers = itertools.count()
        self._writer = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._process = os.getpid()
        self.refresh()
        if writes:
            atexit.register(_flush_at_exit, weakref.ref(self))

    def __len__(self) -> int:
        return len(self._index) + len(self._pending)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index or key in self._pending

    def refresh(self, at_most_every_s: float = 0.0) -> bool:
        """Take in the files that others have completed since.

        Args:
            at_most_every_s: do nothing if that has happened less than so many seconds ago.

        Returns:
            whether it was done.

        Raises:
            CacheError: a file is not what this class writes, or is damaged.
        """
        now = time.monotonic()
        if now - self._looked < at_most_every_s:
            return False
        self._looked = now
        for name in self.place.names():
            if name.endswith(SHARD) and not name.startswith(".") and name not in self._known:
                self._take_in(name)
        return True

    def _take_in(self, name: str) -> None:
        shard = _Shard(self.place, name)
        keys, starts = shard.keys()
        self._register(name, keys, starts)

    def _register(self, name: str, keys: list[bytes], starts: list[int]) -> None:
        number = len(self._files)
        for row, key in enumerate(keys):
            self._index.setdefault(key, number << 32 | row)  # the first one wins
        self._files.append((name, starts))
        self._known.add(name)

    def get(self, key: bytes) -> Entry:
        """The entry of a key that is there.

        Raises:
            CacheError: its file is damaged or gone.
            KeyError: there is none.
        """
        found = self._pending.get(key)
        if found is not None:
            return found
        place = self._index[key]
        return self._shard(place >> 32).entry(place & 0xFFFFFFFF, key)

    def _shard(self, number: int) -> _Shard:
        shard = self._open.get(number)
        if shard is None:
            name, starts = self._files[number]
            shard = self._open[number] = _Shard(self.place, name, starts)
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return shard

    def add(self, key: bytes, entry: Entry) -> Entry:
        """Keep an entry; of two with one key the first is kept.

        Returns:
            the one that is kept.

        Raises:
            CacheError: it could not be written.
        """
        if key in self:
            return self.get(key)
        if not self.writes:
            return entry
        if not self._pending:
            self._pending_since = time.monotonic()
        self._pending[key] = entry
        self._pending_bytes += len(entry.data)
        if self._pending_bytes >= FLUSH_BYTES or time.monotonic() - self._pending_since >= FLUSH_S:
            self.flush()
        return entry

    def flush(self) -> None:
        """Write what is kept in memory.

        Raises:
            CacheError: it could not be written; it is still there to be read, and to be tried again.
        """
        if not self._pending:
            return
        name = f"{self._writer}-{next(self._numbers):06d}{SHARD}"
        keys, entries = list(self._pending), list(self._pending.values())
        specs = {spec: number for number, spec in enumerate(dict.fromkeys(entry.spec for entry in entries))}
        metadata = {MARK: b"1", SPECS: json.dumps(list(specs)).encode()}
        schema = pa.schema([pa.field(column, kind, nullable=False) for column, kind in COLUMNS.items()], metadata)
        with self.place.writing(name) as stream, pa.ipc.new_file(stream, schema) as writer:
            cuts = _cuts([len(entry.data) for entry in entries])
            for start, stop in itertools.pairwise(cuts):
                chosen = entries[start:stop]
                columns = {
                    "key": keys[start:stop],
                    "spec": [specs[entry.spec] for entry in chosen],
                    "crc": [_crc(key, entry) for key, entry in zip(keys[start:stop], chosen, strict=True)],
                    "data": [bytes(entry.data) for entry in chosen],
                }
                arrays = [pa.array(columns[column], kind) for column, kind in COLUMNS.items()]
                writer.write_batch(pa.record_batch(arrays, schema=schema))
        self._register(name, keys, cuts[:-1])
        self._pending.clear()
        self._pending_bytes = 0

    def close(self) -> None:
        """Write what is kept in memory, and let go of the files."""
        if os.getpid() == self._process:  # not in a process that was forked from it
            self.flush()
        self._open.clear()


def _flush_at_exit(reference: weakref.ref[CacheStore]) -> None:
    store = reference()
    if store is not None:
        try:
            store.close()
        except CacheError as error:
            logger.error("the last answers could not be written to the cache: %s", error)


def _cuts(sizes: list[int]) -> list[int]:
    """Where record batches of about :data:`BATCH_BYTES` begin, and the end. Reading a row from afar fetches one."""
    cuts, size = [0], 0
    for row, own in enumerate(sizes):
        size += own
        if size >= BATCH_BYTES or row + 1 == len(sizes):
            cuts.append(row + 1)
            size = 0
    return cuts


class _Shard:
    """One file, open for reading.

    Raises:
        CacheError: it is not what :meth:`CacheStore.flush` writes, or cut off.
    """

    def __init__(self, place: Place, name: str, starts: list[int] | None = None) -> None:
        self.place, self.name = place, name
        self.starts = starts or []
        with self._errors():
            self.file = place.open(name)
            self.reader = pa.ipc.open_file(self.file)
            schema = self.reader.schema
            metadata: Mapping[bytes, bytes] = schema.metadata or {}
            if MARK not in metadata or {field.name: field.type for field in schema} != COLUMNS:
                raise ValueError("it was not written by this package")
            self.specs = json.loads(metadata[SPECS])
            if not isinstance(self.specs, list) or not all(isinstance(spec, str) for spec in self.specs):
                raise ValueError("its metadata are damaged")
        self._batches: OrderedDict[int, _Rows] = OrderedDict()

    def keys(self) -> tuple[list[bytes], list[int]]:
        """Of all rows, and the first row of each record batch; nothing else is read."""
        with self._errors():
            options = pa.ipc.IpcReadOptions(included_fields=[0])
            reader = pa.ipc.open_file(self.file, options=options)
            keys: list[bytes] = []
            starts = []
            for number in range(reader.num_record_batches):
                starts.append(len(keys))
                column = _checked(reader.get_batch(number)).column(0)
                keys += column.to_pylist()
            if any(key is None for key in keys):
                raise ValueError("a key is missing")
        return keys, starts

    def entry(self, row: int, key: bytes) -> Entry:
        """The entry in a row, a view of the file where that is mapped; its bytes are what they were when written."""
        with self._errors():
            number = bisect.bisect_right(self.starts, row) - 1
            rows = self._batches.get(number)
            if rows is None:
                rows = self._batches[number] = _Rows(_checked(self.reader.get_batch(number)))
                # What is mapped costs nothing to keep; what was fetched is memory.
                if len(self._batches) > (MAPPED_BATCHES if self.place.local else 1):
                    self._batches.popitem(last=False)
            return rows.entry(row - self.starts[number], key, self.specs)

    def _errors(self) -> AbstractContextManager[None]:
        return _damaged(self.place, self.name)


class _Rows:
    """A record batch, looked into without turning it into Python objects."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        if any(column.null_count for column in batch.columns):
            raise ValueError("a value is missing")
        self.keys, self.specs, self.crcs, data = batch.columns
        self.offset = data.offset
        _, offsets, values = data.buffers()
        self.offsets = np.frombuffer(offsets, dtype=np.int64)
        self.values = np.frombuffer(values if values is not None else b"", dtype=np.uint8)
        self.whole = np.zeros(batch.num_rows, dtype=bool)

    def entry(self, row: int, key: bytes, specs: list[str]) -> Entry:
        start, stop = self.offsets[self.offset + row : self.offset + row + 2]
        entry = Entry(specs[self.specs[row].as_py()], self.values[start:stop])
        if not self.whole[row]:
            if self.keys[row].as_py() != key or _crc(key, entry) != self.crcs[row].as_py():
                raise ValueError(f"row {row} is not what was written")
            self.whole[row] = True
        return entry


def _crc(key: bytes, entry: Entry) -> int:
    """Of all that belongs to an entry; that of nothing at all is not 0, which damage may leave in its place."""
    return zlib.crc32(entry.data, zlib.crc32(entry.spec.encode(), zlib.crc32(key)))


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Offsets and lengths are in their buffers; without, a damaged file could crash the process."""
    batch.validate(full=True)
    return batch


@contextmanager
def _damaged(place: Place, name: str) -> Iterator[None]:
    """What Arrow and our own checks raise becomes a CacheError that names the file."""
    try:
        yield
    except CacheError:
        raise
    except (OSError, pa.ArrowException, ValueError, IndexError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        expected = f"a cache whose files are whole; {name} is not ({reason}). Delete that file to go on without it"
        raise CacheError(KEY, place.uri, expected) from error
