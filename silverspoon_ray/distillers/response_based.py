"""Learning from the teacher's logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from silverspoon_ray.distillers.base import BaseDistiller, PrepareInputs
from silverspoon_ray.distillers.masks import check_mask
from silverspoon_ray.distillers.vocabulary import check_vocabularies, common_vocabulary
from silverspoon_ray.errors import NotYetError, VocabularyError
from silverspoon_ray.losses import JSDLoss, KLDivergenceLoss, get_loss_function, loss_keywords
from silverspoon_ray.teacher.local import extract_logits
from silverspoon_ray.teacher.protocol import Teacher, TeacherOutput
from silverspoon_ray.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

SoftLoss = Callable[..., torch.Tensor]


class ResponseBasedDistiller(BaseDistiller):
    """The student's logits learn from the teacher's (Hinton et al. 2015, arXiv:1503.02531).

    Logged as ``loss/soft`` (the divergence) and, with ``alpha`` above 0, ``loss/hard`` (the student's own loss on the
    labels); the same under ``eval_``. Works for language models, classifiers, and modules whose output is a tensor.

    Args:
        student_model: the model to train.
        teacher_model: a module, or the handle of a ``TeacherGroup``.
        train_dataset, eval_dataset, data_collator: as for ``Trainer``.
        args: the training arguments.
        soft_loss_fn: a loss by name (``"kl_divergence"``, ``"reverse_kl"``, ``"jsd"``), or a callable
            ``loss(student_logits, teacher_logits)``. A callable that takes ``mask=`` gets the logits as
            they are; any other gets the rows that count, ``[rows, vocabulary]`` (all of them, in their own shape, with
            ``distill_mask="none"``), and must return their mean.
        soft_loss_fn_kwargs: keywords of a loss given by name, e.g. ``{"temperature": 2.0}``.
        prepare_teacher_inputs, prepare_student_inputs: see :class:`BaseDistiller`.
        use_liger_kernel, output_head_layer: for the fused losses; not built yet.
        kwargs: further keywords of ``transformers.Trainer``.
    """

    def __init__(
        self,
        student_model: nn.Module,
        teacher_model: nn.Module | Teacher,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Any = None,
        args: TrainingArguments | None = None,
        soft_loss_fn: str | SoftLoss | None = None,
        soft_loss_fn_kwargs: Mapping[str, Any] | None = None,
        prepare_teacher_inputs: PrepareInputs | None = None,
        prepare_student_inputs: PrepareInputs | None = None,
        use_liger_kernel: bool = False,
        output_head_layer: str | None = None,
        **kwargs: Any,
    ) -> None:
        if use_liger_kernel:
            raise NotYetError("use_liger_kernel", use_liger_kernel, "not built yet, leave it at False")
        if output_head_layer is not None:
            raise NotYetError("output_head_layer", output_head_layer, "not built yet, leave it at None")
        self.soft_loss = soft_loss_from(soft_loss_fn, soft_loss_fn_kwargs)
        self._soft_loss_takes_mask = "mask" in loss_keywords(self.soft_loss)
        self._vocabulary_logged = False
        super().__init__(
            teacher_model=teacher_model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            prepare_teacher_inputs=prepare_teacher_inputs,
            prepare_student_inputs=prepare_student_inputs,
            model=student_model,
            **kwargs,
        )
        tokenizer = self.processing_class
        self.tokens: int | None = len(tokenizer) if hasattr(tokenizer, "__len__") else None
        if self.traits.token_level:
            teacher_config = getattr(self.teacher.structure, "config", None)
            check_vocabularies(teacher_config, getattr(self.student_model, "config", None), self.tokens)

    def distillation_terms(
        self, outputs: Any, answer: TeacherOutput, mask: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """``{"soft": mean divergence over what counts}``."""
        student = extract_logits(outputs)
        # Losses of this package only read; anybody else's gets memory of its own.
        ours = isinstance(self.soft_loss, KLDivergenceLoss | JSDLoss)
        teacher = answer.logits if ours else answer.owned().logits
        assert teacher is not None
        student, teacher = self._common(student, teacher)
        if self.args.auto_dtype_match:
            teacher = teacher.to(student.dtype)
        check_mask(mask, student, self.args.distill_mask)
        if self._soft_loss_takes_mask:
            return {"soft": self.soft_loss(student, teacher, mask=mask)}
        if mask is None:
            return {"soft": self.soft_loss(student, teacher)}
        rows = student[mask]
        if rows.shape[0] == 0:
            return {"soft": rows.sum()}  # connected, exactly 0
        return {"soft": self.soft_loss(rows, teacher[mask])}

    def _common(self, student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if student.shape[:-1] != teacher.shape[:-1]:
            raise VocabularyError(
                "logits",
                (tuple(teacher.shape), tuple(student.shape)),
                "teacher and student logits of one shape but for the vocabulary",
            )
        if student.shape[-1] == teacher.shape[-1]:
            return student, teacher
        size = common_vocabulary(teacher.shape[-1], student.shape[-1], self.tokens)
        if not self._vocabulary_logged:
            self._vocabulary_logged = True
            logger.warning(
                "Vocabularies of teacher (%d) and student (%d) differ by padding; the first %d entries are compared.",
                teacher.shape[-1],
                student.shape[-1],
                size,
            )
        return student[..., :size], teacher[..., :size]


def soft_loss_from(soft_loss_fn: str | SoftLoss | None, kwargs: Mapping[str, Any] | None = None) -> SoftLoss:
    """The loss that a name or callable stands for; None is the KL divergence.

    Raises:
        ConfigError: an unknown name or keyword; the message lists the near ones.
    """
    if soft_loss_fn is None or isinstance(soft_loss_fn, str):
        return get_loss_function(soft_loss_fn or "kl_divergence", **dict(kwargs or {}))
    if kwargs:
        import functools

        return functools.partial(soft_loss_fn, **kwargs)
    return soft_loss_fn
