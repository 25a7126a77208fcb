"""Whether a run needs its teacher at all: not where every sample of it is in the cache."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray.data.dataset import MaterializedDataset
from torch import nn
from transformers import (
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SequenceFeatureExtractor,
    default_data_collator,
)
from transformers.utils import find_labels

from silverspoon_ray.distillers import BaseDistiller
from silverspoon_ray.distillers.masks import PositionRule
from silverspoon_ray.errors import CacheError
from silverspoon_ray.models.source import ModelSource, build_model, known_structure
from silverspoon_ray.models.structure import structure_of
from silverspoon_ray.teacher.cache.entries import DECODER_POSITIONS, Samples
from silverspoon_ray.teacher.cache.head import HEAD
from silverspoon_ray.teacher.cache.identity import digests_of, identity_of, source_digests
from silverspoon_ray.teacher.cache.manifest import compare, stored
from silverspoon_ray.teacher.cache.place import Place
from silverspoon_ray.teacher.cache.store import CacheStore
from silverspoon_ray.teacher.cache.teacher import AbsentTeacher
from silverspoon_ray.teacher.inputs import TeacherInputs, with_decoder_inputs
from silverspoon_ray.teacher.random_stream import RandomStream
from silverspoon_ray.train.data import is_ray_dataset
from silverspoon_ray.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedRun:
    """What of a run decides which samples its teacher would be asked for.

    Attributes:
        args: the training arguments; ``teacher_cache`` is set.
        distiller: the class.
        distiller_kwargs: its keywords, data collator and tokenizer among them.
        teacher, student: where the models come from.
        teacher_kwargs: keywords of ``from_pretrained``.
        datasets: by name, those whose samples will be asked for.
        dedicated: the teacher would have devices of its own.
    """

    args: TrainingArguments
    distiller: type[BaseDistiller]
    distiller_kwargs: Mapping[str, Any]
    teacher: ModelSource
    student: ModelSource
    teacher_kwargs: Mapping[str, Any]
    datasets: Mapping[str, Any]
    dedicated: bool


def absent_teacher(run: CachedRun) -> AbsentTeacher | None:
    """A teacher that need not be started, where every sample is in the cache; None where it has to be.

    Samples are collated one at a time, on the driver, until one is missing. A teacher that is no directory is built
    here once, to see that it is the one whose answers these are.

    Raises:
        CacheError: the cache is damaged, or another teacher's.
    """
    assert run.args.teacher_cache is not None
    place = Place(run.args.teacher_cache)
    there = stored(place)
    if there is None or not all(_can_be_read_twice(dataset) for dataset in run.datasets.values()):
        return None
    store = CacheStore(place, writes=False)
    if not len(store) or (run.args.teacher_logits == "hidden" and HEAD not in place.names()):
        return None
    structure, digests = known_structure(run.teacher), None
    if structure is None or isinstance(run.teacher, nn.Module):
        model = build_model(run.teacher, "teacher", **run.teacher_kwargs)
        structure, digests = structure_of(model), digests_of(model)
        del model
    count = _samples_that_are_there(run, structure, store)
    if count is None:
        return None
    identity = identity_of(structure, digests or source_digests(run.teacher, **run.teacher_kwargs))
    compare(place, there, {"teacher": vars(identity)})
    logger.info("every one of %d samples is in the cache: no teacher is started", count)
    return AbsentTeacher(structure, identity, run.dedicated)


def _can_be_read_twice(dataset: Any) -> bool:
    if is_ray_dataset(dataset):
        return isinstance(dataset, MaterializedDataset)
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _rows(dataset: Any) -> Iterator[Any]:
    if is_ray_dataset(dataset):
        yield from dataset.iter_rows()
    else:
        for index in range(len(dataset)):
            yield dataset[index]


def _samples_that_are_there(run: CachedRun, structure: nn.Module, store: CacheStore) -> int | None:
    """How many samples there are, all in the cache; None where one is missing, or cannot be looked at here."""
    count = 0
    try:
        keyed = _Keys(run, structure)
        with RandomStream(run.args.seed).active():  # the driver's own random numbers stay what they were
            for name, dataset in run.datasets.items():
                for row in _rows(dataset):
                    if keyed(row) not in store:
                        logger.info("the teacher is started: sample %d (%s) is not in the cache", count, name)
                        return None
                    count += 1
    except CacheError:
        raise
    except Exception as error:  # whatever datasets and collators raise; where it matters, the worker raises it too
        logger.info("the teacher is started: what is in the cache cannot be told here (%r)", error)
        return None
    return count or None


class _Keys:
    """The key that a distiller's stream would look a sample up by.

    It follows ``BaseDistiller``; where it does so imperfectly (a student that is not known here, say) a sample does
    not seem to be in the cache, and the teacher is started.
    """

    def __init__(self, run: CachedRun, structure: nn.Module) -> None:
        args, kwargs = run.args, run.distiller_kwargs
        self.student = known_structure(run.student)
        labels = args.label_names
        if labels is None and isinstance(self.student, PreTrainedModel):
            labels = find_labels(type(self.student))
        self.select = TeacherInputs(structure, labels or ["labels"])
        self.prepare = kwargs.get("prepare_teacher_inputs")
        self.whole = args.distill_mask == "none"
        encoder_decoder = bool(getattr(getattr(self.student, "config", None), "is_encoder_decoder", False))
        self.rule = PositionRule(args.distill_mask, encoder_decoder=encoder_decoder)
        self.hints = run.distiller.compares_logits
        tokenizer: Any = kwargs.get("processing_class")
        pads = isinstance(tokenizer, PreTrainedTokenizerBase | SequenceFeatureExtractor)
        self.collate = kwargs.get("data_collator") or (
            DataCollatorWithPadding(tokenizer) if pads else default_data_collator
        )
        self.kept: set[str] | None = None
        if args.remove_unused_columns and self.student is not None:
            accepted = inspect.signature(self.student.forward).parameters
            self.kept = {*accepted, "label", "label_ids", "labels", *(labels or [])}

    def __call__(self, row: Any) -> bytes:
        if self.kept is not None and isinstance(row, Mapping):
            row = {name: value for name, value in row.items() if name in self.kept}
        batch = dict(self.collate([row]))
        if self.prepare is not None:
            return Samples(self.prepare(batch), self.whole).keys[0]
        complete = batch if self.student is None else with_decoder_inputs(self.student, batch)
        chosen = self.select(complete)
        positions = self.rule.decoder_positions(batch) if self.hints else None
        if positions is not None:
            chosen[DECODER_POSITIONS] = positions
        return Samples(chosen, self.whole).keys[0]
