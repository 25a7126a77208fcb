"""A teacher that is asked only for what the cache does not have."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from silverspoon_ray.errors import CacheError
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.teacher.cache.entries import Cutter, Entry, Samples, joined
from silverspoon_ray.teacher.cache.head import read_head, write_head
from silverspoon_ray.teacher.cache.identity import TeacherIdentity, teacher_identity
from silverspoon_ray.teacher.cache.manifest import Manifest, agree, described
from silverspoon_ray.teacher.cache.place import KEY, Place
from silverspoon_ray.teacher.cache.store import REFRESH_S, CacheStore
from silverspoon_ray.teacher.protocol import (
    GivesHead,
    PendingAnswer,
    Teacher,
    TeacherOutput,
    TeacherRequest,
    TeacherStream,
)

logger = logging.getLogger(__name__)


class CachedTeacher:
    """A :class:`~silverspoon_ray.teacher.protocol.Teacher` in front of another.

    Answers are put together sample by sample. What the cache does not have is asked of the inner teacher, in a batch
    of those samples alone, and kept. What a student sees is the same whether a sample was there or not: at padding it
    is 0, and floating-point tensors have the request's ``wire_dtype``, also where the inner teacher is in this process.

    Args:
        teacher: the inner one.
        uri: a directory or URI.
        tokenizer: hash of the vocabulary, if it is known.
        identity: who the inner teacher is; None: it is asked.
        whole: padding counts in the loss, so it is part of a sample.
        autocast: see :class:`~silverspoon_ray.teacher.cache.manifest.Manifest`.
        in_step: all processes ask the inner teacher equally often. It says whether any of them needs it, given whether
            this one does.

    Raises:
        CacheError: the place cannot be written to, or the inner teacher does not say who it is.
    """

    def __init__(
        self,
        teacher: Teacher,
        uri: str,
        *,
        tokenizer: str | None = None,
        identity: TeacherIdentity | None = None,
        whole: bool = False,
        autocast: str | None = None,
        in_step: Callable[[bool], bool] | None = None,
    ) -> None:
        self.inner = teacher
        self.dedicated = teacher.dedicated
        self.place = Place(uri)
        self.place.make()
        self.identity = identity if identity is not None else teacher_identity(teacher)
        self.tokenizer = tokenizer
        self.whole = whole
        self.autocast = autocast
        self.in_step = in_step
        self.store: CacheStore | None = None
        if hasattr(teacher, "model"):
            self.model = teacher.model
        if isinstance(teacher, GivesHead | AbsentTeacher):
            self.output_head = self._output_head

    @property
    def structure(self) -> nn.Module:
        return self.inner.structure

    def open(self, request: TeacherRequest) -> CachedStream:
        """A stream of answers to ``request``.

        Raises:
            CacheError: the place holds other answers, or damaged ones.
        """
        padding = "kept" if self.whole else "left out"
        agree(self.place, Manifest(described(request), self.identity, self.tokenizer, padding, self.autocast))
        if self.store is None:
            self.store = CacheStore(self.place)
        if request.logits == "hidden" and isinstance(self.inner, GivesHead):
            write_head(self.place, self.inner.output_head)
        return CachedStream(self, self.store, request, self.inner.open(request))

    def flush(self) -> None:
        """Write what is not in a file yet.

        Raises:
            CacheError: it could not be written.
        """
        if self.store is not None:
            self.store.flush()

    def _output_head(self) -> OutputHead:
        return self.inner.output_head() if isinstance(self.inner, GivesHead) else read_head(self.place)


class CachedStream:
    """Batches to a :class:`CachedTeacher`.

    Args:
        teacher: the cached one.
        store: the entries.
        request: what is wanted.
        inner: the inner teacher's stream.
    """

    def __init__(
        self, teacher: CachedTeacher, store: CacheStore, request: TeacherRequest, inner: TeacherStream
    ) -> None:
        self.teacher = teacher
        self.store = store
        self.request = request
        self.inner = inner
        self.cutter = Cutter()

    def submit(self, batch: Mapping[str, Any]) -> CachedAnswer:
        """Ask for the rows that are missing; returns at once."""
        samples = Samples(batch, self.teacher.whole)
        keys = [self._key(samples, row) for row in range(samples.rows)]
        if None in keys and self.store.refresh(REFRESH_S):
            keys = [self._key(samples, row) for row in range(samples.rows)]
        missing = [row for row, key in enumerate(keys) if key is None]
        asked = bool(missing)
        if self.teacher.in_step is not None and self.teacher.in_step(asked):
            asked = True
        pending = self.inner.submit(samples.part(missing or [0])) if asked else None
        return CachedAnswer(self, samples, keys, missing, pending)

    def _key(self, samples: Samples, row: int) -> bytes | None:
        """The key of an entry for this sample in this batch; None: there is none."""
        key = samples.keys[row]
        if key in self.store:
            return key
        bound = samples.bound(row) if samples.masks else key
        return bound if bound in self.store else None

    def on_wire(self, answer: TeacherOutput) -> TeacherOutput:
        """As it would arrive from another process: see ``TeacherRequest.wire_dtype``."""
        wire = self.request.wire_dtype
        if wire is None:
            return answer

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(wire) if tensor.is_floating_point() else tensor

        return dataclasses.replace(answer.map(cast), soft_targets=answer.soft_targets)


class CachedAnswer:
    """An answer of which some rows may still be computed.

    Attributes:
        asked: the inner teacher computes something for it.
        hits: samples that were in the cache.
    """

    def __init__(
        self,
        stream: CachedStream,
        samples: Samples,
        keys: Sequence[bytes | None],
        missing: Sequence[int],
        pending: PendingAnswer | None,
    ) -> None:
        self.stream = stream
        self.samples = samples
        self.keys = keys
        self.missing = missing
        self.pending = pending
        self.asked = pending is not None
        self.hits = len(keys) - len(missing)
        self.nbytes = 0
        self._output: TeacherOutput | None = None

    def ready(self) -> bool:
        return self.pending is None or self.pending.ready()

    def result(self) -> TeacherOutput:
        """Wait for what is missing, keep it, and put all rows together.

        Raises:
            TeacherError: the inner teacher failed.
            CacheError: entries are damaged, cannot be written, or what the teacher gives cannot be kept.
        """
        if self._output is None:
            computed = self._computed()
            store = self.stream.store
            entries = [computed[row] if key is None else store.get(key) for row, key in enumerate(self.keys)]
            try:
                self._output = joined(entries, self.samples)
            except CacheError as error:
                raise CacheError(KEY, self.stream.teacher.place.uri, error.expected) from error
        return self._output

    def _computed(self) -> dict[int, Entry]:
        """The rows that were missing, as the cache has them now."""
        if self.pending is None:
            return {}
        answer = self.pending.result()
        self.nbytes = self.pending.nbytes
        computed = {}
        if self.missing:
            cut = self.stream.cutter.cut(self.stream.on_wire(answer), self.samples, self.missing)
            for row, (entry, bound) in zip(self.missing, cut, strict=True):
                key = self.samples.bound(row) if bound else self.samples.keys[row]
                # A sample that came twice was computed twice; what is kept is what every student sees.
                computed[row] = self.stream.store.add(key, entry)
        del answer
        self.pending.release()
        return computed

    def release(self) -> None:
        self._output = None
        if self.pending is not None:
            self.pending.release()


class AbsentTeacher:
    """Only what is known of a teacher, for a run whose answers are all in the cache.

    Args:
        structure: its model on the meta device.
        identity: who it is.
        dedicated: whether batches are to be looked up ahead of the student.
    """

    def __init__(self, structure: nn.Module, identity: TeacherIdentity, dedicated: bool = False) -> None:
        self.structure = structure
        self.identity = identity
        self.dedicated = dedicated

    def open(self, request: TeacherRequest) -> AbsentTeacher:
        return self

    def submit(self, batch: Mapping[str, Any]) -> PendingAnswer:
        """Raise a CacheError: a sample is missing after all."""
        shapes = ", ".join(f"{k} {list(v.shape)}" for k, v in batch.items() if isinstance(v, torch.Tensor))
        raise CacheError(
            KEY,
            f"no entry for {shapes}",
            "a dataset that gives the same samples every time: every one was in the cache when the run began, so no "
            "teacher was started, and now there is one that is not. Where samples are changed at random (augmentation, "
            "masking in the collator), leave teacher_cache at None, or fix the changes before training",
        )
