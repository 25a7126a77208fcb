"""Learning from the teacher's logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from silverspoon_ray.distillers.base import BaseDistiller, PrepareInputs
from silverspoon_ray.distillers.masks import check_mask
from silverspoon_ray.distillers.soft_targets import (
    SoftTargetReader,
    check_form,
    is_ours,
)
from silverspoon_ray.distillers.student_head import StudentHead
from silverspoon_ray.distillers.task_loss import counted_labels, labels_by_row
from silverspoon_ray.distillers.terms import LossTerm
from silverspoon_ray.distillers.vocabulary import check_vocabularies, common_vocabulary, vocabulary_size
from silverspoon_ray.errors import VocabularyError
from silverspoon_ray.losses import JSDLoss, KLDivergenceLoss, get_loss_function, loss_keywords
from silverspoon_ray.losses.fused import LinearStudent, combined_loss
from silverspoon_ray.losses.targets import SoftTargets
from silverspoon_ray.models.output_head import output_head_name
from silverspoon_ray.teacher.lookahead import Ticket
from silverspoon_ray.teacher.protocol import Teacher, TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.wanted import extract_logits
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
        output_head_layer: dotted name of the student's output head; None: found where transformers names it. If it is
            a plain linear layer and the loss one of ours, the student's logits are never held in full.
        use_liger_kernel: accepted for scripts of silverspoon-kd; our own fused losses are used with and without it.
        kwargs: further keywords of ``transformers.Trainer``.
    """

    compares_logits = True

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
        self.soft_loss = soft_loss_from(soft_loss_fn, soft_loss_fn_kwargs)
        self._soft_loss_is_ours = is_ours(self.soft_loss)
        self._soft_loss_takes_mask = "mask" in loss_keywords(self.soft_loss)
        self._vocabulary_logged = False
        # Students that do nothing behind their head, by when that was seen: in training, with the task loss. There are
        # several where a `model_init` makes one for every call of `train`.
        self._head_explains: WeakKeyDictionary[nn.Module, set[tuple[bool, bool]]] = WeakKeyDictionary()
        if args is not None:
            check_form(getattr(args, "teacher_logits", "full"), self.soft_loss)
        tokenizer: Any = kwargs.get("processing_class")
        self.tokens: int | None = len(tokenizer) if hasattr(tokenizer, "__len__") else None
        if use_liger_kernel:
            logger.info("use_liger_kernel: the fused losses of silverspoon_ray do the same, and are used for it")
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
        if self.traits.token_level:
            teacher_config = getattr(self.teacher.structure, "config", None)
            check_vocabularies(teacher_config, getattr(self.student_model, "config", None), self.tokens)
        self.reader = SoftTargetReader(self.teacher, self.stream_request, self.args.device)
        self.head: StudentHead | None = None
        self._why_not_fused = self._unfusable(output_head_layer)
        if self._why_not_fused is None:
            name = output_head_name(self.student_model, output_head_layer)
            assert name is not None
            self.head = StudentHead(lambda: self.student_model, name)
        else:
            logger.info("the student's logits are computed in full: %s", self._why_not_fused)

    def teacher_request(self) -> TeacherRequest:
        form = self.args.teacher_logits
        request = replace(super().teacher_request(), logits=form)
        if form in ("top_k", "sampled"):
            request = replace(
                request,
                top_k=self.args.teacher_top_k,
                temperature=float(self._own_loss.temperature),
                classes=self._common_classes(),
                seed=self.args.seed if form == "sampled" else 0,
            )
        return request

    def _common_classes(self) -> int | None:
        """The classes that both models have, where their configurations say so."""
        teacher = vocabulary_size(getattr(self.teacher.structure, "config", None))
        student = vocabulary_size(getattr(self.student_model, "config", None))
        if not self.traits.token_level or teacher is None or student is None:
            return None
        return common_vocabulary(teacher, student, self.tokens)

    # ---- the loss from logits ------------------------------------------------------------

    def distillation_terms(
        self, outputs: Any, answer: TeacherOutput, mask: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """``{"soft": mean divergence over what counts}``."""
        student = extract_logits(outputs)
        check_mask(mask, student, self.args.distill_mask)
        if self.args.teacher_logits in ("top_k", "sampled"):
            targets = self.reader.targets(answer)
            loss = combined_loss(student, targets, self._own_loss, mask=mask, **self._shared(student, targets))
            return {"soft": loss.total}
        # Losses of this package only read; anybody else's gets memory of its own.
        student, teacher = self._common(student, self.reader.logits(answer, owned=not self._soft_loss_is_ours))
        if self.args.auto_dtype_match:
            teacher = teacher.to(student.dtype)
        if self._soft_loss_takes_mask:
            return {"soft": self.soft_loss(student, teacher, mask=mask)}
        if mask is None:
            return {"soft": self.soft_loss(student, teacher)}
        rows = student[mask]
        if rows.shape[0] == 0:
            return {"soft": rows.sum()}  # connected, exactly 0
        return {"soft": self.soft_loss(rows, teacher[mask])}

    @property
    def _own_loss(self) -> KLDivergenceLoss | JSDLoss:
        assert isinstance(self.soft_loss, KLDivergenceLoss | JSDLoss)
        return self.soft_loss

    # ---- the loss without logits ---------------------------------------------------------

    def _unfusable(self, output_head_layer: str | None) -> str | None:
        """Why the student's logits have to be computed in full; None: they need not."""
        if not self._soft_loss_is_ours:
            return "the soft_loss_fn takes logits"
        if type(self).distillation_terms is not ResponseBasedDistiller.distillation_terms:
            return f"{type(self).__name__} has distillation_terms of its own"
        name = output_head_name(self.student_model, output_head_layer)
        if name is None:
            return f"{type(self.student_model).__name__} has no plain linear output head that is known"
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return "the student's parameters are sharded"
        if self.args.torch_compile:
            return "the student is compiled"
        if self.wants_task and not self._task_is_cross_entropy():
            return "the student's own loss is not a cross-entropy of its logits alone"
        return None

    def _task_is_cross_entropy(self) -> bool:
        config = getattr(self.student_model, "config", None)
        further = bool(getattr(config, "output_router_logits", False)) or self.args.label_smoothing_factor != 0
        return self.traits.cross_entropy and self.compute_loss_func is None and not further

    def student_terms(
        self, model: nn.Module, inputs: dict[str, Any], ticket: Ticket, with_task: bool, with_outputs: bool
    ) -> tuple[Any, dict[str, LossTerm]]:
        """As the base's; where nobody wants the logits, they are never held: each piece of them is computed, compared
        and turned into its gradient before the next."""
        own = self._own_inputs(inputs)
        if with_outputs or not self._goes_without_logits(own, with_task):
            return self._terms_in_full(model, inputs, own, ticket, with_task)
        overlap = self.args.overlap_teacher_forward is not False
        answer = None if overlap else self._answer(ticket)
        ticket.start()
        student = self._student_without_head(model, own)
        answer = self._answer(ticket) if answer is None else answer
        return None, self._fused_terms(student, self.reader.targets(answer), inputs, own, ticket, with_task)

    def _goes_without_logits(self, own: dict[str, Any], with_task: bool) -> bool:
        """Nothing needs the student's logits in full, as far as the losses of this batch go.

        Args:
            own: what the student is called with.
            with_task: its task loss is wanted.
        """
        if self.head is None or not self.head.usable:
            return False
        if with_task and not (isinstance(own.get("labels"), torch.Tensor) and self._task_is_cross_entropy()):
            return False
        seen, case = self._head_explains.setdefault(self.student_model, set()), (self.model.training, with_task)
        if case not in seen:
            inputs = own if with_task else {key: value for key, value in own.items() if key not in self._targets}
            with FlopCounterMode(display=False) if self.args.count_flops else nullcontext() as counter:
                explains = self.head.explains(inputs, with_task, self._loss_shifts_labels)
            self._flops_aside += counter.get_total_flops() if counter is not None else 0
            if not explains:
                logger.warning(
                    "the student's logits are computed in full: %s does more behind its %s than scale its logits, cap "
                    "them softly and, for its task loss, take their cross-entropy",
                    type(self.student_model).__name__,
                    self.head.name,
                )
                self.head = None
                return False
            seen.add(case)
        return True

    def _student_without_head(self, model: nn.Module, own: dict[str, Any]) -> LinearStudent:
        """The student's last hidden state and its head."""
        assert self.head is not None
        with self.head.left_out():
            self._own_forward(model, own, with_task=False)
        return self.head.seen()

    def _fused_terms(
        self,
        student: LinearStudent,
        targets: SoftTargets,
        inputs: dict[str, Any],
        own: dict[str, Any],
        ticket: Ticket,
        with_task: bool,
    ) -> dict[str, LossTerm]:
        mask = self.position_rule.mask(inputs)
        check_mask(mask, student.hidden, self.args.distill_mask)
        positions: torch.Tensor | int = self.position_rule.positions(inputs) if mask is None else mask.sum()
        soft = LossTerm(torch.zeros(()), positions)
        terms = {"soft": soft}
        labels = None
        if with_task:
            count = counted_labels(own, self._loss_shifts_labels)
            assert count is not None
            terms["hard"] = LossTerm(soft.mean, count, kind="task")
            labels = labels_by_row(own, self._loss_shifts_labels)
        shared = self._shared(student.hidden, targets, student.head.weight.shape[0])
        loss = partial(combined_loss, student, targets, self._own_loss, mask=mask, labels=labels, **shared)
        means: dict[str, torch.Tensor | None]
        if torch.is_grad_enabled() and self.args.magnitude_aware_weighting:
            # The weights follow from the values, so each component needs a gradient of its own.
            means = {"soft": loss().total}
            if with_task:
                means["hard"] = loss(soft_weight=0.0, task_weight=1.0).total
            return _with_means(terms, means)
        if ticket.repeated:  # before the gradient is weighed, which happens here
            terms = {name: replace(term, count=0) for name, term in terms.items()}
        weights = {name: self._share(term, ticket) for name, term in terms.items()}
        result = loss(soft_weight=weights["soft"] * (1 - self.alpha), task_weight=weights.get("hard", 0.0) * self.alpha)
        terms = _with_means(terms, {"soft": result.soft, "hard": result.task})
        if torch.is_grad_enabled():
            terms["soft"] = replace(terms["soft"], carrier=result.total)
        return terms

    # ---- vocabularies --------------------------------------------------------------------

    def _shared(self, student: torch.Tensor, targets: SoftTargets, classes: int | None = None) -> dict[str, Any]:
        """Which classes are compared, as a keyword of the loss.

        Args:
            student: its logits, or hidden states.
            targets: the teacher's.
            classes: the student's, where ``student`` does not show them.
        """
        rows = targets.rows
        if student.shape[:-1] != rows:
            raise VocabularyError(
                "logits", (tuple(rows), tuple(student.shape[:-1])), "teacher and student logits for the same positions"
            )
        theirs = targets.classes or self.stream_request.classes
        own = student.shape[-1] if classes is None else classes
        return {} if theirs is None or theirs == own else {"classes": self._common_size(theirs, own)}

    def _common(self, student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if student.shape[:-1] != teacher.shape[:-1]:
            raise VocabularyError(
                "logits",
                (tuple(teacher.shape), tuple(student.shape)),
                "teacher and student logits of one shape but for the vocabulary",
            )
        if student.shape[-1] == teacher.shape[-1]:
            return student, teacher
        size = self._common_size(teacher.shape[-1], student.shape[-1])
        return student[..., :size], teacher[..., :size]

    def _common_size(self, teacher: int, student: int) -> int:
        size = common_vocabulary(teacher, student, self.tokens)
        if not self._vocabulary_logged:
            self._vocabulary_logged = True
            logger.warning(
                "Vocabularies of teacher (%d) and student (%d) differ by padding; the first %d entries are compared.",
                teacher,
                student,
                size,
            )
        return size


def _with_means(terms: Mapping[str, LossTerm], means: Mapping[str, torch.Tensor | None]) -> dict[str, LossTerm]:
    """The terms with their values."""
    done = {}
    for name, term in terms.items():
        mean = means[name]
        assert mean is not None
        done[name] = replace(term, mean=mean)
    return done


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
