"""How batches reach a distiller: with their answers on the way, and with what counts in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from silverspoon_ray.distillers.callbacks import StepClock
from silverspoon_ray.distillers.evaluation import ExactEvaluation
from silverspoon_ray.distillers.loading import install_lookahead, loader_of, own_rows_loader
from silverspoon_ray.distillers.masks import PositionRule
from silverspoon_ray.teacher.cache.entries import DECODER_POSITIONS
from silverspoon_ray.teacher.inputs import TeacherInputs, with_decoder_inputs
from silverspoon_ray.teacher.lookahead import TICKET_KEY, TeacherTraffic, Window
from silverspoon_ray.teacher.protocol import Teacher, TeacherStream


class BatchesAhead(ExactEvaluation):
    """The reading half of a distiller; :class:`~silverspoon_ray.distillers.base.BaseDistiller` is the other."""

    clock: StepClock
    teacher: Teacher
    stream: TeacherStream
    teacher_traffic: TeacherTraffic
    position_rule: PositionRule
    prepare_teacher_inputs: Callable[[dict[str, Any]], dict[str, Any]] | None
    select_teacher_inputs: TeacherInputs
    _resume_position: dict[str, Any] | None

    def counted(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor | int | None]:
        raise NotImplementedError

    def _teacher_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        if self.prepare_teacher_inputs is not None:
            return self.prepare_teacher_inputs(dict(batch))
        chosen = self.select_teacher_inputs(with_decoder_inputs(self.student_model, dict(batch)))
        if self.cache is not None and self.compares_logits:  # only then do the labels say what counts
            positions = self.position_rule.decoder_positions(batch)
            chosen |= {} if positions is None else {DECODER_POSITIONS: positions}
        return chosen

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """The micro-batches of the next optimizer step, with what counts in them."""
        self.clock.start()
        # Here, because this is the one place that sees every training iterator before its first batch.
        self._with_lookahead(loader_of(epoch_iterator), training=True)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def get_train_dataloader(self) -> Any:
        if not getattr(self.train_dataset, "divided_by_rank", False):
            return super().get_train_dataloader()
        collate = self._get_collator_with_removed_columns(self.data_collator, description="Training")
        return own_rows_loader(self.train_dataset, self._train_batch_size, collate, self.args)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._with_lookahead(super().get_eval_dataloader(eval_dataset), training=False)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._with_lookahead(super().get_test_dataloader(test_dataset), training=False)

    def _with_lookahead(self, loader: Any, training: bool) -> Any:
        depth = self.args.teacher_prefetch if self.args.overlap_teacher_forward is not False else 0
        # What an evaluation waits for is no part of the training step's time.
        traffic = self.teacher_traffic if training else TeacherTraffic()
        installed = install_lookahead(
            loader,
            self.args,
            training=training,
            teacher_inputs=self._teacher_batch,
            window=(lambda: Window(self.stream, depth, traffic)) if self.teacher.dedicated else None,
            depth=depth,
            resume_position=self._resume_position,
        )
        if training and loader is not None:
            self._resume_position = None  # of the first epoch after resuming, and no other
        return installed

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Count what enters the losses of one optimizer step, over its micro-batches and all ranks."""
        tickets = [batch[TICKET_KEY] for batch in batch_samples if isinstance(batch, Mapping) and TICKET_KEY in batch]
        if not tickets or len(tickets) < len(batch_samples):
            return super()._get_num_items_in_batch(batch_samples, device)
        self.leave_out_repeated(batch_samples[-1])
        totals: dict[str, torch.Tensor | None] = {}
        for batch in map(self.position_rule.without_padding, batch_samples):
            own = 0 if batch[TICKET_KEY].repeated else 1
            for kind, count in self.counted(batch).items():
                before = totals.get(kind, torch.zeros((), dtype=torch.int64, device=device))
                totals[kind] = None if before is None or count is None else before + count * own
        known = {kind: total for kind, total in totals.items() if total is not None}
        sums = torch.stack(list(known.values()))
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            sums = self.accelerator.gather(sums.unsqueeze(0)).sum(dim=0)
        items = dict(zip(known, sums.clamp(min=1), strict=True))
        for ticket in tickets:
            ticket.items = items
            ticket.share = 1 / len(batch_samples)
        return items.get("task")
