"""What the distillers that compare intermediate activations have in common."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import DistributedDataParallelKwargs
from safetensors import SafetensorError
from torch import nn

from silverspoon_ray.alignments.alignment import Alignment
from silverspoon_ray.alignments.describe import described, loss_label
from silverspoon_ray.alignments.projector_files import PROJECTORS_FILE, load_alignments, save_projectors
from silverspoon_ray.alignments.selector import OutputSelector
from silverspoon_ray.distillers.attached import attach_projectors, attached_projectors, projector_state
from silverspoon_ray.distillers.base import BaseDistiller
from silverspoon_ray.distillers.callbacks import AlignmentClipping
from silverspoon_ray.distillers.grids import SAMPLES, Grid, GridRule
from silverspoon_ray.distillers.optimizers import (
    SchedulerSet,
    by_alignment,
    gradient_norm,
    parameters_of,
    with_own_optimizers,
)
from silverspoon_ray.distillers.sample import one_sample
from silverspoon_ray.distillers.task_loss import counted_labels
from silverspoon_ray.distillers.terms import LossTerm
from silverspoon_ray.errors import AlignmentError, ConfigError
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest
from silverspoon_ray.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)


class FeatureDistiller(BaseDistiller):
    """A distiller whose losses are over pairs of modules. Arguments are those of :class:`BaseDistiller`.

    Raises:
        AlignmentError: the alignments do not fit the models, or a projector cannot be made.
    """

    optimizer: Any
    lr_scheduler: Any
    kind = ""
    """``"holistic"`` or ``"blockwise"``, as checkpoints name it."""
    groups_by_alignment = False
    """Optimizer groups are made per alignment, and gradients clipped per alignment."""

    def __init__(self, *, alignments: Sequence[Alignment] | None = None, **kwargs: Any) -> None:
        self.alignments = list(alignments or [])
        if not self.alignments:
            raise ConfigError("alignments", alignments, "at least one Alignment; create_alignments makes them")
        for alignment in self.alignments:
            if not isinstance(alignment, Alignment):
                raise ConfigError(
                    "alignments",
                    type(alignment).__name__,
                    "a list of Alignment, as create_alignments makes it (DistillationTrainer takes its keywords)",
                )
        self._gradient_norms: dict[str, torch.Tensor] = {}
        self._rates: dict[str, float] = {}
        super().__init__(alignments=self.alignments, **kwargs)
        self.names = self._unique_names()
        self.grid_rule = GridRule(self.args.distill_mask, self.position_rule, self.traits.encoder_decoder)
        self._make_projectors()
        for alignment in self.alignments:
            for projector in alignment.trained_modules.values():
                projector.to(self.args.device)
        attach_projectors(self.model, self.alignments)
        if self.args.max_grad_norm == 0:  # then Trainer asks for no clipping
            self.add_callback(AlignmentClipping(self.clip_alignments))
        logger.info("alignments:\n%s", described(self.alignments))

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """DDP looks for parameters that take no part: an output head, say, that no loss needs. Trainer does not ask for
        it under activation checkpointing, because of the reentrant kind."""
        made: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        if self.args.ddp_find_unused_parameters is None:
            for handler in made["kwargs_handlers"]:
                if isinstance(handler, DistributedDataParallelKwargs):
                    handler.find_unused_parameters = True
        return made

    @classmethod
    def check_arguments(cls, args: TrainingArguments) -> None:
        super().check_arguments(args)
        if args.torch_compile:
            raise ConfigError("torch_compile", True, "must be False; what is captured changes between calls")

    # ---- which modules -------------------------------------------------------------------

    def teacher_request(self) -> TeacherRequest:
        """Outputs of the aligned modules, no logits. A part of an output that all want is cut out where it is made."""
        self._find_names()
        names = [alignment.teacher_module_name for alignment in self.alignments]
        wanted: dict[str, set[Any]] = {}
        for alignment in self.alignments:
            wanted.setdefault(alignment.teacher_module_name, set()).add(alignment.teacher_output_selector)
        selectors = [
            (name, next(iter(found)))
            for name, found in wanted.items()
            if len(found) == 1 and isinstance(next(iter(found)), OutputSelector)
        ]
        return TeacherRequest(
            logits=None,
            outputs=tuple(dict.fromkeys(names)),
            wire_dtype=super().teacher_request().wire_dtype,
            selectors=tuple(selectors),
            copies=self.args.deepcopy_captured_args_and_kwargs,
        )

    def _find_names(self) -> None:
        """Fill in names that were left out, and see that every block is where its name says."""
        local = getattr(self.teacher, "model", None)
        teachers = [model for model in (local, self.teacher.structure) if isinstance(model, nn.Module)]
        for alignment in self.alignments:
            if not alignment.teacher_module_name:
                alignment.teacher_module_name = _name_of(alignment.teacher_block, teachers, "teacher")
            if not alignment.student_module_name:
                alignment.student_module_name = _name_of(alignment.student_block, [self.student_model], "student")
            if alignment.student_block is self.student_model:
                expected = "a part of the student; for its outputs there is ResponseBasedDistiller"
                raise AlignmentError("student_block", type(alignment.student_block).__name__, expected)
            if alignment.teacher_module_name not in dict(teachers[0].named_modules()):
                raise AlignmentError("teacher_module_name", alignment.teacher_module_name, "a module of the teacher")
            found = dict(self.student_model.named_modules()).values()
            if not any(module is alignment.student_block for module in found):
                expected = "a module of the student that is trained, not of another"
                if any(alignment.student_block is module for model in teachers for module in model.modules()):
                    expected += "; it is the teacher's: are student_model and teacher_model in each other's place?"
                raise AlignmentError("student_block", alignment.get_name(), expected)

    def _unique_names(self) -> list[str]:
        names: list[str] = []
        for alignment in self.alignments:
            plain = name = alignment.get_name()
            if name in names:
                name = plain = f"{name}#{loss_label(alignment)}"
            number = 2
            while name in names:
                name, number = f"{plain}#{number}", number + 1
            names.append(name)
        return names

    # ---- projectors ----------------------------------------------------------------------

    def _make_projectors(self) -> None:
        """Make them from the shapes of one sample, now: optimizer, DDP and a resumed run then know them. Shapes that do
        not fit are an error now, too, where a sample can be had."""
        wanted = any(alignment.auto_projector for alignment in self.alignments)
        try:
            batch = one_sample(self)
        except AlignmentError:
            if wanted:
                raise
            return
        if batch is None and wanted:
            raise AlignmentError(
                "auto_projector", True, "False, with the projectors given, where there is no dataset to see shapes in"
            )
        if batch is None:
            return
        inputs = dict(self._prepare_inputs(batch))
        pending = self.stream.submit(self._teacher_batch(inputs))
        answer = pending.result().to(self.args.device)
        with torch.random.fork_rng(devices=[] if self.args.device.type == "cpu" else [self.args.device]):
            # Of their own seed: the student's random numbers are the same with and without projectors.
            torch.manual_seed(self.args.seed)
            with torch.no_grad(), self.accelerator.autocast():
                self.see_shapes(inputs, answer)
        pending.release()

    def see_shapes(self, inputs: dict[str, Any], answer: TeacherOutput) -> None:
        """Let each alignment make the projectors it needs for a batch of one sample."""
        raise NotImplementedError

    # ---- losses --------------------------------------------------------------------------

    def counted(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor | int | None]:
        """Tokens, decoder tokens, samples and labels."""
        grids = self.grid_rule.grids(batch)
        return {
            "task": counted_labels(batch, self._loss_shifts_labels),
            **{kind: grid.count for kind, grid in grids.items()},
        }

    def term(
        self, number: int, student: torch.Tensor, teacher: torch.Tensor, grids: Mapping[str, Grid], shared: bool
    ) -> LossTerm:
        """One alignment's loss.

        Args:
            number: which alignment.
            student, teacher: features as selected.
            grids: the batch's.
            shared: the teacher's tensor must not be written to.
        """
        alignment = self.alignments[number]
        grid = self.grid_rule.grid_of(student, alignment.student_module_name, grids)
        mean = alignment.loss(student, teacher, grid.mask, shared)
        if alignment.counts_samples:
            grid = grids[SAMPLES]
        return LossTerm(mean, grid.count, grid.kind, alignment.loss_weight)

    def summaries(self, means: Mapping[str, float]) -> dict[str, float]:
        """``alignment``: the weighted sum of all alignments, where there is a task loss beside it."""
        if not self.wants_task:
            return {}
        weights = dict(zip(self.names, (a.loss_weight for a in self.alignments), strict=True))
        return {"alignment": sum(weights[name] * mean for name, mean in means.items() if name in weights)}

    # ---- optimizer -----------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Trainer's optimizer, with groups per alignment where the distiller wants them, and the alignments' own."""
        before: torch.optim.Optimizer | None = self.optimizer
        if before is None:
            made = super().create_optimizer(model)
            if self.groups_by_alignment:
                by_alignment(made, self.alignments)
            self._main_optimizer = made
            self.optimizer = with_own_optimizers(made, self.alignments)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Trainer's scheduler, for what the alignments have no optimizer of their own for, beside theirs."""
        own = list({id(a.scheduler): a.scheduler for a in self.alignments if a.scheduler is not None}.values())
        given: Any = self.lr_scheduler
        if given is not None or all(a.optimizer is None for a in self.alignments):
            return super().create_scheduler(num_training_steps, optimizer)
        if self._main_optimizer.param_groups:
            own.insert(0, super().create_scheduler(num_training_steps, self._main_optimizer))
        if not own:
            own = [torch.optim.lr_scheduler.LambdaLR(self.alignments[0].optimizer, lambda _: 1.0)]
        self.lr_scheduler = SchedulerSet(own)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip per alignment where that is asked for, then the rest as Trainer does.

        Returns:
            the norm of all gradients, where blocks are clipped each for itself before that.
        """
        norms = self.clip_alignments()
        if self.groups_by_alignment:
            return torch.stack(list(norms.values())).square().sum().sqrt()
        held = attached_projectors(self.student_model)
        left_out = set() if self.args.clip_projectors or held is None else {id(p) for p in held.parameters()}
        return gradient_norm([p for p in model.parameters() if id(p) not in left_out], self.args.max_grad_norm)

    def clip_alignments(self) -> dict[str, torch.Tensor]:
        """Clip the gradients of each alignment that has a limit; norms before that, by name."""
        self.accelerator.unscale_gradients()
        norms = {}
        for name, alignment in zip(self.names, self.alignments, strict=True):
            limit = alignment.max_grad_norm
            if limit is None and self.groups_by_alignment:
                limit = self.args.max_grad_norm
            if limit is not None:
                held = {id(p) for projector in alignment.trained_modules.values() for p in projector.parameters()}
                own = [p for p in parameters_of(alignment) if self.args.clip_projectors or id(p) not in held]
                norms[name] = gradient_norm(own, limit or None)
        self._gradient_norms = norms
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        self._rates = {self.names[g["alignment"]]: float(g["lr"]) for g in groups if "alignment" in g}
        return norms

    # ---- checkpoints ---------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._projector_state = projector_state(self.student_model)  # on every rank, before one of them writes
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            directory = Path(output_dir if output_dir is not None else self.args.output_dir)
            state = getattr(self, "_projector_state", None) or projector_state(self.student_model)
            save_projectors(directory, self.alignments, state, distiller=self.kind)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_projectors(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.state.best_model_checkpoint is not None:
            self._load_projectors(self.state.best_model_checkpoint)

    def _load_projectors(self, checkpoint: str) -> None:
        held = attached_projectors(self.student_model)
        path = Path(checkpoint) / PROJECTORS_FILE
        if held is None:
            return
        pairs = [(a.teacher_module_name, a.student_module_name) for a in self.alignments]
        try:
            saved = [(a["teacher_module"], a["student_module"]) for a in load_alignments(checkpoint)["alignments"]]
        except (ValueError, LookupError) as error:
            raise ConfigError("resume_from_checkpoint", checkpoint, f"a whole checkpoint; {error}") from error
        if saved != pairs:
            raise ConfigError(
                "resume_from_checkpoint",
                checkpoint,
                f"a checkpoint of the same alignments; it has {saved}, here {pairs}",
            )
        if not path.is_file():
            raise ConfigError("resume_from_checkpoint", checkpoint, f"a checkpoint with its {PROJECTORS_FILE}")
        try:
            held.load_state_dict(safetensors.torch.load_file(path))
        except (RuntimeError, SafetensorError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise ConfigError(
                "resume_from_checkpoint", str(path), f"projectors of the same alignments; {reason}"
            ) from error


def _name_of(block: nn.Module, models: Sequence[nn.Module], whose: str) -> str:
    for model in models:
        for name, module in model.named_modules():
            if module is block:
                return name
    raise AlignmentError(f"{whose}_block", type(block).__name__, f"a module of the {whose}; it is in no part of it")
