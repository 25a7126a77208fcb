"""The cache's files: complete or not there, shared by several writers, refused where damaged."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from silverspoon_ray.errors import CacheError
from silverspoon_ray.teacher.cache import store as store_module
from silverspoon_ray.teacher.cache.entries import Entry
from silverspoon_ray.teacher.cache.head import HEAD, read_head
from silverspoon_ray.teacher.cache.manifest import MANIFEST
from silverspoon_ray.teacher.cache.place import Place
from silverspoon_ray.teacher.cache.store import CacheStore
from silverspoon_ray.teacher.protocol import TeacherRequest
from tests.distillers.kinds import KINDS
from tests.teacher.cache_kinds import answer, cached, teacher_batch

ROOT = Path(__file__).parents[2]
SPEC = json.dumps({"tree": {"logits": {"t": 0}}, "tensors": [["uint8", [16], None]]})


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def entry_of(number: int, size: int = 16) -> Entry:
    return Entry(SPEC, bytes([number % 251]) * size)


def filled(path: Path, *numbers: int) -> CacheStore:
    store = CacheStore(Place(str(path)))
    for number in numbers:
        store.add(key_of(number), entry_of(number))
    store.flush()
    return store


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_round_trip(tmp_path: Path, scheme: str) -> None:
    """Pending, written, and read by another; nothing but shards is left behind."""
    place = Place(f"{scheme}{tmp_path / 'a' / 'b'}")
    place.make()
    store = CacheStore(place)
    for number in range(100):
        store.add(key_of(number), entry_of(number, number))
    assert bytes(store.get(key_of(7)).data) == bytes([7]) * 7
    assert list((tmp_path / "a" / "b").iterdir()) == []
    store.flush()
    store.flush()
    for one in (store, CacheStore(place)):
        assert len(one) == 100
        for number in range(100):
            assert bytes(one.get(key_of(number)).data) == bytes([number]) * number
            assert one.get(key_of(number)).spec == SPEC
    assert [p.suffix for p in (tmp_path / "a" / "b").iterdir()] == [".arrow"]
    assert key_of(100) not in store
    with pytest.raises(KeyError):
        store.get(key_of(100))


def test_flushes_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "FLUSH_BYTES", 1000)
    monkeypatch.setattr(store_module, "BATCH_BYTES", 300)
    store = CacheStore(Place(str(tmp_path)))
    for number in range(100):
        store.add(key_of(number), entry_of(number, 100))
    assert len(list(tmp_path.glob("*.arrow"))) == 10
    for number in random.Random(0).sample(range(100), 100):
        assert bytes(store.get(key_of(number)).data) == bytes([number]) * 100


def test_flushes_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(store_module.time, "monotonic", lambda: now[0])
    store = CacheStore(Place(str(tmp_path)))
    for number in range(3):
        store.add(key_of(number), entry_of(number))
        now[0] += 40
    assert len(list(tmp_path.glob("*.arrow"))) == 1
    assert len(CacheStore(Place(str(tmp_path)))) == 3


def test_the_first_wins(tmp_path: Path) -> None:
    """In memory, and between files; all who read agree with the file that is first by name."""
    one = filled(tmp_path, 1)
    assert bytes(one.add(key_of(1), entry_of(9)).data) == bytes([1]) * 16
    other = CacheStore(Place(str(tmp_path)))
    assert bytes(other.add(key_of(1), entry_of(9)).data) == bytes([1]) * 16
    blind = filled(tmp_path, 2)
    other.add(key_of(2), entry_of(7))
    other.flush()
    assert len(blind) == 2
    assert len(CacheStore(Place(str(tmp_path)))) == 2


def test_refresh(tmp_path: Path) -> None:
    one, other = filled(tmp_path, 1), filled(tmp_path, 2)
    assert key_of(2) not in one
    assert not one.refresh(at_most_every_s=1000)
    assert one.refresh()
    assert key_of(2) in one
    assert key_of(1) in other


def test_entries_are_read_from_the_map(tmp_path: Path) -> None:
    """10,000 entries of 20 kB: what the process holds of its own stays flat while all are read."""
    store = CacheStore(Place(str(tmp_path)))
    block = os.urandom(20_000)
    for number in range(10_000):
        store.add(key_of(number), Entry(SPEC, block))
    store.flush()
    reader = CacheStore(Place(str(tmp_path)))
    del store
    for number in range(0, 10_000, 500):
        reader.get(key_of(number))
    before = anonymous_bytes()
    for number in range(10_000):
        assert len(reader.get(key_of(number)).data) == 20_000
    assert anonymous_bytes() - before < 4 << 20


def anonymous_bytes() -> int:
    """Resident memory that is no file's: pages of a map are the kernel's to take back."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


# ---- damage --------------------------------------------------------------------------------------------------


def shard(path: Path) -> Path:
    return next(path.glob("*.arrow"))


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, -1])
def test_truncated(tmp_path: Path, kept: float) -> None:
    filled(tmp_path, *range(50))
    content = shard(tmp_path).read_bytes()
    shard(tmp_path).write_bytes(content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(CacheError, match=shard(tmp_path).name) as refused:
        CacheStore(Place(str(tmp_path)))
    assert refused.value.value == str(tmp_path)
    assert refused.value.key == "teacher_cache"


def test_a_foreign_file(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    (tmp_path / "notes.txt").write_text("mine")
    assert len(CacheStore(Place(str(tmp_path)))) == 1
    table = pa.table({"a": [1, 2]})
    with pa.OSFile(str(tmp_path / "foreign.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CacheError, match=r"foreign\.arrow.*not written by this package"):
        CacheStore(Place(str(tmp_path)))


def test_leftovers_of_a_writer_are_ignored(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    content = shard(tmp_path).read_bytes()
    (tmp_path / ".host-1-ab-000000.arrow.0123.partial").write_bytes(content[:100])
    (tmp_path / ".hidden.arrow").write_bytes(b"torn")
    assert len(CacheStore(Place(str(tmp_path)))) == 1


def test_a_changed_bit_of_an_entry(tmp_path: Path) -> None:
    """Arrow would not notice."""
    filled(tmp_path, *range(5))
    content = bytearray(shard(tmp_path).read_bytes())
    at = content.index(bytes([3]) * 16)
    content[at + 2] ^= 1
    shard(tmp_path).write_bytes(content)
    store = CacheStore(Place(str(tmp_path)))
    store.get(key_of(2))
    with pytest.raises(CacheError, match="is not what was written"):
        store.get(key_of(3))


def test_random_bytes(tmp_path: Path) -> None:
    """Anywhere in a file, and whole files of them: what was written, or a CacheError. Run apart: it must not crash."""
    code = f"""
import random
from pathlib import Path
from silverspoon_ray.errors import CacheError
from silverspoon_ray.teacher.cache.place import Place
from silverspoon_ray.teacher.cache.store import CacheStore
from tests.teacher.test_cache_store import entry_of, filled, key_of, shard
path = Path({str(tmp_path)!r})
filled(path, *range(20))
name, good = shard(path), shard(path).read_bytes()
generator, refused = random.Random(0), 0
for trial in range(600):
    content = bytearray(good)
    if trial % 10 == 9:
        content = bytearray(generator.randbytes(generator.randrange(5000)))
    elif trial % 10 == 8:
        content[8:-10] = generator.randbytes(len(good) - 18)
    for _ in range(generator.choice([1, 1, 4, 32])):
        if content:
            content[generator.randrange(len(content))] = generator.randrange(256)
    name.write_bytes(content)
    try:
        store = CacheStore(Place(str(path)), writes=False)
        for number in range(20):
            if key_of(number) in store:
                got = store.get(key_of(number))
                assert bytes(got.data) == bytes([number]) * 16, number
    except CacheError:
        refused += 1
print(refused)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 200 < int(done.stdout.split()[-1]) < 600


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"format": 99}', b"\xff\xfe", b'{"format": 1}'])
def test_a_manifest_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    teacher, _ = cached(tmp_path, "perceptron")
    teacher.open(TeacherRequest())
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(CacheError, match=r"manifest\.json|which this run needs"):
        teacher.open(TeacherRequest())


def test_a_manifest_that_is_gone(tmp_path: Path) -> None:
    teacher, _ = cached(tmp_path, "perceptron")
    answer(teacher, TeacherRequest(), teacher_batch("perceptron", KINDS["perceptron"].data(2, 3)))
    teacher.flush()
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(CacheError, match="nobody knows whose answers these are"):
        cached(tmp_path, "perceptron")[0].open(TeacherRequest())


def test_a_shard_that_is_gone(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    store = CacheStore(Place(str(tmp_path)))
    shard(tmp_path).unlink()
    with pytest.raises(CacheError, match="is not"):
        store.get(key_of(1))


def test_the_head(tmp_path: Path) -> None:
    """Kept beside hidden states, exact; damaged or missing it is refused."""
    teacher, inner = cached(tmp_path, "llama")
    with pytest.raises(CacheError, match="output_head"):
        read_head(teacher.place)
    teacher.open(TeacherRequest(logits="hidden"))
    head, expected = read_head(teacher.place), inner.output_head()
    assert torch.equal(head.weight, expected.weight)
    assert (head.bias, head.scale, head.softcap) == (expected.bias, expected.scale, expected.softcap)
    good = (tmp_path / HEAD).read_bytes()
    for content in (b"", good[:50], good[:-5], b"\0" * 100):
        (tmp_path / HEAD).write_bytes(content)
        with pytest.raises(CacheError, match="output_head"):
            read_head(teacher.place)


# ---- several processes ---------------------------------------------------------------------------------------


def write_forever(path: str, first: int) -> None:
    """Entries one after the other, a file for every ten."""
    store_module.FLUSH_BYTES = 10 * 5000
    store = CacheStore(Place(path))
    for number in range(first, 10**9, 2):
        store.add(key_of(number), Entry(SPEC, bytes([number % 251]) * 5000))


def test_killed_while_writing(tmp_path: Path) -> None:
    """Two writers at once, killed at a random moment, again and again: what is there is whole, and used."""
    context = multiprocessing.get_context("fork")
    generator = random.Random(1)
    for attempt in range(4):
        writers = [context.Process(target=write_forever, args=(str(tmp_path), first)) for first in (0, 1)]
        before = len(list(tmp_path.glob("*.arrow")))
        for writer in writers:
            writer.start()
        limit = time.monotonic() + 60
        while len(list(tmp_path.glob("*.arrow"))) < before + 6 and time.monotonic() < limit:
            time.sleep(0.002)
        time.sleep(generator.random() * 0.02)
        for writer in writers:
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
        store = CacheStore(Place(str(tmp_path)))
        assert len(store) >= 10 * 6 * (attempt > 0)
        for number in range(0, 40):
            if key_of(number) in store:
                data = np.frombuffer(store.get(key_of(number)).data, dtype=np.uint8)
                assert len(data) == 5000
                assert (data == number % 251).all()


def test_two_processes_begin_one_cache(tmp_path: Path) -> None:
    """Both write the manifest and the same samples; one manifest, no error, and a third has all it needs."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_begin, args=(str(tmp_path),)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted({p.suffix for p in tmp_path.iterdir()}) == [".arrow", ".json"]
    teacher, inner = cached(tmp_path, "perceptron")
    inner.broken = True
    answer(teacher, TeacherRequest(), teacher_batch("perceptron", KINDS["perceptron"].data(8, 3)))


def _begin(path: str) -> None:
    teacher, _ = cached(path, "perceptron")
    for start in (0, 4):
        answer(
            teacher, TeacherRequest(), teacher_batch("perceptron", KINDS["perceptron"].data(8, 3)[start : start + 4])
        )
        teacher.flush()


# ---- places --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uri", ["nowhere://bucket/x", "s3://", "://"])
def test_no_such_file_system(uri: str) -> None:
    with pytest.raises(CacheError) as refused:
        Place(uri).make()
    assert refused.value.value == uri


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/1/nothing")):
        with pytest.raises(CacheError) as refused:
            Place(str(path)).make()
        assert refused.value.value == str(path)
        with pytest.raises(CacheError):
            Place(str(path)).look()
    Place(str(tmp_path / "new" / "one")).look()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("links", [True, False])
def test_the_first_writer_of_a_file_wins(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError("no hard links")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    place = Place(str(tmp_path))
    for content in (b"first", b"second"):
        with place.writing("x", exclusive=True) as stream:
            stream.write(content)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert place.read("x") == b"first"
    with contextlib.suppress(KeyboardInterrupt), place.writing("y") as stream:
        stream.write(b"half of it")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_store_elsewhere(tmp_path: Path) -> None:
    """A file system that cannot be mapped into memory: the same entries."""
    from pyarrow import fs

    place = Place(str(tmp_path))
    place.filesystem, place.local = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), False
    place.root = "deep/down"
    place.make()
    with place.writing("x", exclusive=True) as stream:
        stream.write(b"first")
    with place.writing("x", exclusive=True) as stream:
        stream.write(b"second")
    assert place.read("x") == b"first"
    assert place.read("y") is None
    store = CacheStore(place)
    store.add(key_of(1), entry_of(1))
    store.flush()
    assert bytes(CacheStore(place).get(key_of(1)).data) == bytes([1]) * 16
