"""The part of a distiller that does not depend on what is compared: a Hugging Face Trainer with a teacher."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from silverspoon_ray.distillers.attached import detach_projectors
from silverspoon_ray.distillers.batches import BatchesAhead
from silverspoon_ray.distillers.cached import cached_teacher, check_cache
from silverspoon_ray.distillers.callbacks import CacheCallback, ProfilerCallback, StepClock
from silverspoon_ray.distillers.checkpoint import SafeCheckpoints
from silverspoon_ray.distillers.diagnostics import WeightWatcherCallback
from silverspoon_ray.distillers.masks import PositionRule
from silverspoon_ray.distillers.metrics import EvaluationMeter, TrainingMeter
from silverspoon_ray.distillers.task_loss import TaskLossTraits, counted_labels, cross_entropy
from silverspoon_ray.distillers.terms import LossTerm, combine
from silverspoon_ray.errors import CacheError, ConfigError
from silverspoon_ray.teacher.cache.identity import teacher_identity
from silverspoon_ray.teacher.cache.teacher import AbsentTeacher, CachedTeacher
from silverspoon_ray.teacher.compiled import CompiledLayers, compile_settings
from silverspoon_ray.teacher.distributed import shard_local
from silverspoon_ray.teacher.inputs import NEVER_SENT, TeacherInputs, with_decoder_inputs
from silverspoon_ray.teacher.local import LocalTeacher, as_teacher
from silverspoon_ray.teacher.lookahead import TICKET_KEY, TeacherTraffic, Ticket, Window
from silverspoon_ray.teacher.protocol import Teacher, TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.wanted import extract_logits
from silverspoon_ray.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

PrepareInputs = Callable[[dict[str, Any]], dict[str, Any]]


class BaseDistiller(BatchesAhead, SafeCheckpoints):
    """A Hugging Face ``Trainer`` whose student learns from a teacher.

    Subclasses say what is compared: :meth:`distillation_terms` computes it, :meth:`teacher_request` declares what of
    the teacher it needs. Everything else is Trainer's: autocast, accumulation, DDP, clipping, checkpoints.

    Args:
        teacher_model: a module (it then runs in this process), or any
            :class:`~silverspoon_ray.teacher.protocol.Teacher` such as a ``TeacherGroup``'s handle.
        alignments: pairs of teacher and student modules; for the distillers that compare features.
        args: the training arguments.
        train_dataset, eval_dataset: as for ``Trainer``.
        prepare_teacher_inputs: ``batch -> teacher's keyword arguments``; None: the batch without labels.
        prepare_student_inputs: ``batch -> student's keyword arguments``; None: the batch.
        kwargs: further keywords of ``transformers.Trainer``; ``model`` is the student.

    Raises:
        ConfigError: something cannot work; before the first batch is read.
    """

    backward_per_block_works = False
    compares_logits = False

    def __init__(
        self,
        teacher_model: nn.Module | Teacher,
        alignments: list[Any] | None = None,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        prepare_teacher_inputs: PrepareInputs | None = None,
        prepare_student_inputs: PrepareInputs | None = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else TrainingArguments(output_dir="trainer_output")
        if not isinstance(args, TrainingArguments):
            raise ConfigError(
                "args", type(args).__name__, "silverspoon_ray.TrainingArguments, which knows our keywords"
            )
        self.check_arguments(args)
        check_cache(args, teacher_model, kwargs.get("model"))
        if isinstance(kwargs.get("model"), nn.Module):
            detach_projectors(kwargs["model"])  # of an earlier distiller
        super().__init__(args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)

        if not self.label_names and args.label_names is None:
            # A plain module that takes no labels: Trainer sees none, but the task loss is computed with them here.
            self.label_names: list[str] = ["labels"]

        # ---- teacher -------------------------------------------------------------------
        self.teacher_model = teacher_model
        place = self.place_model_on_device and teacher_model is not self.model
        self.teacher = as_teacher(teacher_model, args.device, args.overlap_teacher_forward, place)
        # Before it is spread over ranks, while its weights can be looked at.
        identity = teacher_identity(self.teacher) if args.teacher_cache is not None else None
        if args.teacher_placement == "sharded" and not isinstance(self.teacher, AbsentTeacher):
            shard_local(self.teacher, self.accelerator.num_processes, args.device)
        settings = compile_settings(args)
        if settings is not None and isinstance(self.teacher, LocalTeacher) and teacher_model is not self.model:
            self.teacher.compiled = CompiledLayers(self.teacher.model, **settings)
        self.alignments = list(alignments or [])
        self.prepare_teacher_inputs = prepare_teacher_inputs
        self.prepare_student_inputs = prepare_student_inputs
        self.select_teacher_inputs = TeacherInputs(self.teacher.structure, self.label_names)
        self.teacher_traffic = TeacherTraffic()

        # ---- student and its losses ----------------------------------------------------
        self.traits = TaskLossTraits(self.model)
        # Trainer's own answer, which it counts labels by, is wrong for GPT-2 and its like.
        self._loss_shifts_labels = self.traits.shifts_labels
        self.position_rule = PositionRule(
            args.distill_mask, self.traits.shifts_labels, self.traits.token_level, self.traits.encoder_decoder
        )
        # The loss comes out of compute_loss as this micro-batch's share of the whole step: nothing is left to divide.
        self.loss_is_scaled_for_ga = True

        # ---- bookkeeping ---------------------------------------------------------------
        self.clock = StepClock()
        self.training_meter = TrainingMeter()
        self.evaluation_meter = EvaluationMeter()
        self._reported_loss: torch.Tensor | None = None
        self._flops_per_step: int | None = None
        # Of what the first step does and no later one will.
        self._flops_aside = 0
        self.add_callback(self.clock)
        if args.use_weightwatcher:
            self.add_callback(WeightWatcherCallback(self.log))
        if args.enable_profiling:
            where = args.profiling_output_dir or os.path.join(args.output_dir, "profiling")
            self.add_callback(ProfilerCallback(where))
        if args.accelerator_config.dispatch_batches is None:
            # With dispatching one rank would read and cut all batches, and the other ranks' teachers would be asked
            # too late. Every rank reads the same stream and keeps its own part instead: the same batches.
            self.accelerator.dataloader_config.dispatch_batches = False

        self.stream_request = replace(self.teacher_request(), transport=args.teacher_transport)
        self.cache: CachedTeacher | None = None
        if identity is not None:
            self.teacher = self.cache = cached_teacher(self, identity)
            self.add_callback(CacheCallback(self.cache.flush))
        self.stream = self.teacher.open(self.stream_request)

    @classmethod
    def check_arguments(cls, args: TrainingArguments) -> None:
        """Refuse arguments that this distiller cannot work with, before it has models or devices.

        Raises:
            ConfigError: naming the argument.
        """
        if args.teacher_logits != "full" and not cls.compares_logits:
            expected = f'"full"; {cls.__name__} does not compare logits'
            raise ConfigError("teacher_logits", args.teacher_logits, expected)
        if args.backward_per_block and not cls.backward_per_block_works:
            raise ConfigError("backward_per_block", True, f"must be False; {cls.__name__} has one backward pass")

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's.

        Raises:
            ConfigError: every parameter of the student is frozen.
        """
        self.check_trainable()
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            if self.cache is not None:
                with contextlib.suppress(CacheError):  # what went wrong first is what counts
                    self.cache.flush()
            raise

    def check_trainable(self) -> None:
        """Refuse a student that cannot learn."""
        count = sum(1 for _ in self.model.parameters())
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigError(
                "student_model",
                type(self.student_model).__name__,
                f"a student with parameters that learn; all {count} are frozen",
            )

    # ---- for subclasses ------------------------------------------------------------------

    def teacher_request(self) -> TeacherRequest:
        """What is wanted of the teacher for every batch."""
        wire = self.args.teacher_wire_dtype
        return TeacherRequest(wire_dtype=getattr(torch, wire) if wire else None)

    def distillation_terms(
        self, outputs: Any, answer: TeacherOutput, mask: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The distillation losses of one batch, each a mean over what ``mask`` counts (0 where it counts nothing).

        Args:
            outputs: what the student's forward returned.
            answer: the teacher's, on the student's device.
            mask: boolean, see :class:`~silverspoon_ray.distillers.masks.PositionRule`; None: everything counts.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what it compares")

    def counted(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor | int | None]:
        """How much of a batch enters the losses, by ``LossTerm.kind``; None where a batch does not say."""
        mask = self.position_rule.mask(batch)
        return {
            "soft": self.position_rule.positions(batch) if mask is None else mask.sum(),
            "task": counted_labels(batch, self._loss_shifts_labels),
        }

    def student_terms(
        self, model: nn.Module, inputs: dict[str, Any], ticket: Ticket, with_task: bool, with_outputs: bool
    ) -> tuple[Any, dict[str, LossTerm]]:
        """Student forward, the teacher's answer, and every component as a mean with its count.

        The order is what makes the two overlap: the teacher is asked before the student's forward starts and waited
        for after it has ended.

        Args:
            model: the student, possibly wrapped.
            inputs: a batch, on the student's device.
            ticket: the batch's.
            with_task: the task loss is wanted.
            with_outputs: the student's outputs are wanted; without, they may be None.
        """
        return self._terms_in_full(model, inputs, self._own_inputs(inputs), ticket, with_task)

    def _terms_in_full(
        self, model: nn.Module, inputs: dict[str, Any], own: dict[str, Any], ticket: Ticket, with_task: bool
    ) -> tuple[Any, dict[str, LossTerm]]:
        """:meth:`student_terms`, ``own`` being what the student's forward is called with."""
        if self.args.overlap_teacher_forward is not False:
            ticket.start()
            outputs, task = self._own_forward(model, own, with_task)
            answer = self._answer(ticket)
        else:
            answer = self._answer(ticket)
            outputs, task = self._own_forward(model, own, with_task)
        mask = self.position_rule.mask(inputs)
        count: torch.Tensor | int = self.position_rule.positions(inputs) if mask is None else mask.sum()
        terms = {name: LossTerm(value, count) for name, value in self.distillation_terms(outputs, answer, mask).items()}
        return outputs, terms if task is None else {**terms, "hard": task}

    # ---- the loss ------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """This micro-batch's share of the optimizer step's loss: (1 - alpha) x distillation + alpha x task.

        Args:
            model: the student, possibly wrapped.
            inputs: a batch, on the student's device.
            return_outputs: also return the student's outputs.
            num_items_in_batch: labels that count in the whole step. The lookahead has counted them already; this is
                used for batches that did not come through it.
        """
        inputs = dict(inputs)
        ticket = self.ticket_of(inputs, num_items_in_batch)
        outputs, terms = self._loss_terms(model, inputs, ticket, self.wants_task, return_outputs)
        self.data_position = ticket.random_state_after or self.data_position
        shares = {name: self._share(term, ticket) for name, term in terms.items()}
        for name, term in terms.items():
            self.training_meter.add(name, term.mean * shares[name])
        loss = combine(terms, shares, self.alpha, self.args.magnitude_aware_weighting)
        if self.args.magnitude_aware_weighting:
            self._reported_loss = combine(terms, shares, self.alpha, False).detach()
        return (loss, outputs) if return_outputs else loss

    def ticket_of(self, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None) -> Ticket:
        """The batch's ticket, taken out of it; a new one for a batch that did not come through the lookahead."""
        ticket: Ticket | None = inputs.pop(TICKET_KEY, None)
        if ticket is None:
            ticket = Ticket(share=1 / getattr(self, "current_gradient_accumulation_steps", 1))
            if num_items_in_batch is not None:
                ticket.items = {"soft": num_items_in_batch, "task": num_items_in_batch}
        return ticket

    def _share(self, term: LossTerm, ticket: Ticket) -> torch.Tensor | float:
        """This micro-batch's part of a component of the whole step."""
        total = ticket.items.get(term.kind)
        # Ranks are averaged afterwards; a denominator over all ranks has to be undone by their number.
        ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return ticket.share if total is None else term.count / total * ranks

    def _loss_terms(
        self, model: nn.Module, inputs: dict[str, Any], ticket: Ticket, with_task: bool, with_outputs: bool = True
    ) -> tuple[Any, dict[str, LossTerm]]:
        """See :meth:`student_terms`; afterwards the answer's memory is free."""
        outputs, terms = self.student_terms(model, self.prepared(inputs, ticket), ticket, with_task, with_outputs)
        ticket.release()
        if ticket.repeated:
            terms = {name: replace(term, count=0) for name, term in terms.items()}
        return outputs, terms

    def prepared(self, inputs: dict[str, Any], ticket: Ticket) -> dict[str, Any]:
        """The batch without labels on padding, and a ticket that can be submitted."""
        inputs = dict(self.position_rule.without_padding(inputs))
        if ticket.window is None:
            traffic = self.teacher_traffic if self.model.training else TeacherTraffic()
            ticket.window = Window(self.stream, 0, traffic)
            ticket.teacher_batch = self._teacher_batch(inputs)
        return inputs

    def _answer(self, ticket: Ticket) -> TeacherOutput:
        """Wait for the teacher: its answer on the student's device, for this rank's own samples."""
        answer = ticket.answer()
        answer = answer.map(ticket.cut) if ticket.cut is not None else answer
        answer = answer.to(self.args.device)
        if not self.teacher.dedicated:
            ticket.release()  # then a tensor goes when the student is done with it, not with the whole answer
        return answer

    def _student_forward(
        self, model: nn.Module, inputs: dict[str, Any], with_task: bool
    ) -> tuple[Any, LossTerm | None]:
        """The student's outputs, and its task loss as a mean where it is wanted."""
        return self._own_forward(model, self._own_inputs(inputs), with_task)

    def _own_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the student is called with."""
        if self.prepare_student_inputs is not None:
            inputs = self.prepare_student_inputs(dict(inputs))
        return with_decoder_inputs(self.student_model, inputs)

    def _own_forward(self, model: nn.Module, inputs: dict[str, Any], with_task: bool) -> tuple[Any, LossTerm | None]:
        if not with_task:
            return model(**{key: value for key, value in inputs.items() if key not in self._targets}), None
        count = counted_labels(inputs, self._loss_shifts_labels)
        if count is None:
            raise ConfigError("alpha", self.args.alpha, "0 where batches have no `labels` for a task loss")
        if not self.traits.gives_loss and self.compute_loss_func is None:
            if inputs["labels"].is_floating_point():
                raise ConfigError("alpha", self.args.alpha, "0, or a compute_loss_func, where labels are no classes")
            outputs = model(**{key: value for key, value in inputs.items() if key not in self._targets})
            loss = cross_entropy(extract_logits(outputs), inputs["labels"])
        else:
            # With the batch's own count as denominator the Trainer gives the batch's mean.
            items = count.clamp(min=1)
            # A copy, because Trainer takes the labels out for label smoothing and compute_loss_func.
            loss, outputs = super().compute_loss(model, dict(inputs), return_outputs=True, num_items_in_batch=items)
            if self.args.average_tokens_across_devices and (self.model_accepts_loss_kwargs or self.compute_loss_func):
                loss = loss / (self.accelerator.num_processes // self.get_tp_size())
        loss = torch.where(count > 0, loss, torch.zeros_like(loss))  # a mean over no labels is nan
        return outputs, LossTerm(loss, count, kind="task")

    @property
    def _targets(self) -> frozenset[str]:
        return NEVER_SENT | frozenset(self.label_names)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Trainer's step. Under magnitude-aware weighting it returns the unweighted loss, which is what is logged:
        the weighted one is constant by construction."""
        if self.args.count_flops and self._flops_per_step is None:
            self._flops_aside = 0
            with FlopCounterMode(display=False) as counter:
                loss = super().training_step(model, inputs, num_items_in_batch)
            flops = counter.get_total_flops() - self._flops_aside
            self._flops_per_step = flops * self.args.gradient_accumulation_steps
        else:
            loss = super().training_step(model, inputs, num_items_in_batch)
        return self._reported_loss if self._reported_loss is not None else loss

    # ---- logs and checkpoints ------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's log, with the components of the loss and what the teacher cost."""
        if "loss" in logs:
            seconds, steps = self.clock.take()
            self.training_meter.steps = steps
            means = self.training_meter.take(self.accelerator.gather)
            for name, mean in {**means, **self.summaries(means)}.items():
                logs[f"loss/{name}"] = mean
            if self._flops_per_step is not None:
                logs["flops/step"] = float(self._flops_per_step)
                logs["flops/total"] = float(self._flops_per_step * self.state.global_step)
            traffic = self.teacher_traffic.take()
            if steps and (self.teacher.dedicated or self.cache is not None):
                logs["teacher/wait_fraction"] = traffic.wait_s / seconds if seconds > 0 else 0.0
                logs["teacher/bytes_per_step"] = traffic.nbytes / steps
                logs["teacher/forwards"] = float(traffic.answers)
                logs["teacher/cache_hits"] = float(traffic.hits)
        super().log(logs, start_time)

    # ---- models --------------------------------------------------------------------------

    @property
    def student_model(self) -> nn.Module:
        """The student without DDP, FSDP or compile wrappers."""
        unwrapped: nn.Module = self.accelerator.unwrap_model(self.model)
        return unwrapped
