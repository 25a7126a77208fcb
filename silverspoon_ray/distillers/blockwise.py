"""BlockwiseDistiller: each block of the student learns alone, from its teacher block's input and output."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from silverspoon_ray.alignments.alignment import Alignment
from silverspoon_ray.capture import version_of
from silverspoon_ray.distillers.base import PrepareInputs
from silverspoon_ray.distillers.features import FeatureDistiller
from silverspoon_ray.distillers.loading_students import run_block
from silverspoon_ray.distillers.optimizers import parameters_of
from silverspoon_ray.distillers.students import StudentModels, save_named_students, the_student
from silverspoon_ray.distillers.terms import LossTerm, weighted
from silverspoon_ray.distillers.trunk import BlockCall, Trunk, overridden_forward
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.teacher.inputs import TeacherInputs, with_decoder_inputs
from silverspoon_ray.teacher.local import evaluating
from silverspoon_ray.teacher.lookahead import Ticket
from silverspoon_ray.teacher.protocol import Teacher, TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.wanted import check_unwritten
from silverspoon_ray.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)


class BlockwiseDistiller(FeatureDistiller):
    """Each student block gets the input of its teacher block and learns to give its output: a regression of its own.

    Gradients never cross blocks, so that blocks can be trained one after the other (``args.backward_per_block``: memory
    of one block instead of all). The teacher provides hidden states only; masks, position embeddings and every other
    argument of a block are the student's own, so that another width, head size or position encoding works.

    Logged are ``loss/<alignment name>``, ``grad_norm/<alignment name>`` (before clipping, which is per block) and
    ``learning_rate/<alignment name>``. There is no task loss: ``alpha`` has no effect.

    Args:
        teacher_model: a module, or the handle of a ``TeacherGroup``.
        alignments: pairs of blocks; :func:`~silverspoon_ray.create_alignments` makes them. Output projectors turn the
            block's output into the teacher's size, input projectors the teacher's input into the block's.
        train_dataset, eval_dataset, data_collator: as for ``Trainer``.
        args: the training arguments.
        auto_truncate: without effect: neither the teacher nor the student ever runs beyond what is needed.
        prepare_teacher_inputs, prepare_student_inputs: see :class:`BaseDistiller`.
        student_models: the models that the student blocks belong to, by name. A checkpoint then has each as a
            ``from_pretrained`` directory ``student_model_<name>``. Alignments made by ``create_alignments`` know their
            model, and a single one is saved at the checkpoint's top in any case.
        student_model: the one model that they belong to.
        kwargs: further keywords of ``transformers.Trainer``.
    """

    _signature_columns: Any
    kind = "blockwise"
    groups_by_alignment = True
    backward_per_block_works = True

    def __init__(
        self,
        teacher_model: nn.Module | Teacher,
        alignments: Sequence[Alignment],
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Any = None,
        args: TrainingArguments | None = None,
        auto_truncate: bool = False,
        prepare_teacher_inputs: PrepareInputs | None = None,
        student_models: Mapping[str, nn.Module] | None = None,
        prepare_student_inputs: PrepareInputs | None = None,
        student_model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        self.student_models = dict(student_models or {})
        student = the_student(alignments, self.student_models, student_model)
        self._trunks: list[tuple[nn.Module, Trunk, TeacherInputs]] = []
        super().__init__(
            teacher_model=teacher_model,
            alignments=alignments,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            prepare_teacher_inputs=prepare_teacher_inputs,
            prepare_student_inputs=prepare_student_inputs,
            model=student,
            **kwargs,
        )
        if self.args.alpha > 0:
            logger.warning("BlockwiseDistiller has no task loss; alpha=%s is ignored.", self.args.alpha)
        if self.args.backward_per_block and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ConfigError("backward_per_block", True, "False with FSDP or DeepSpeed; DDP works")

    @property
    def alpha(self) -> float:
        return 0.0

    def check_trainable(self) -> None:
        for name, alignment in zip(self.names, self.alignments, strict=True):
            if not parameters_of(alignment):
                raise ConfigError("student_block", name, "a block with parameters that learn; all of its are frozen")

    def teacher_request(self) -> TeacherRequest:
        """Outputs and inputs of the aligned blocks; what is one's output and another's input travels once."""
        request = super().teacher_request()
        return TeacherRequest(**{**vars(request), "inputs": request.outputs})

    def _set_signature_columns_if_needed(self) -> None:
        """Of several students, the columns that any of them takes."""
        super()._set_signature_columns_if_needed()
        if isinstance(self.model, StudentModels):
            taken = [name for model in self.model.models.values() for name in signature(model.forward).parameters]
            self._signature_columns = list(dict.fromkeys([*self._signature_columns, *taken]))

    # ---- calls of the student's blocks -----------------------------------------------------

    def _calls(self, forward: Any, inputs: dict[str, Any]) -> dict[nn.Module, BlockCall]:
        """How each student block is called, by block; ``forward`` is the forward of a student that is one model."""
        if not self._trunks:
            blocks = [alignment.student_block for alignment in self.alignments]
            model = self.student_model
            for student in model.models.values() if isinstance(model, StudentModels) else [model]:
                inside = set(student.modules())
                own = [block for block in blocks if block in inside]
                self._trunks.append((student, Trunk(student, own), TeacherInputs(student, self.label_names)))
        found: dict[nn.Module, BlockCall] = {}
        for student, trunk, select in self._trunks:
            single = student is self.student_model
            found |= trunk.calls(forward if single else student.forward, **select(inputs))
        return found

    def _student_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if self.prepare_student_inputs is not None:
            inputs = self.prepare_student_inputs(dict(inputs))
        return with_decoder_inputs(self.student_model, inputs)

    def see_shapes(self, inputs: dict[str, Any], answer: TeacherOutput) -> None:
        calls = self._calls(self.student_model.forward, self._student_inputs(inputs))
        self._trunks.clear()  # seen with a batch of one sample
        for alignment in self.alignments:
            call, given = calls[alignment.student_block], answer.inputs[alignment.teacher_module_name]
            if call.hidden is not None:
                alignment.make_input_projector(call.hidden, given)
                if alignment.input_projector is not None:
                    alignment.input_projector.to(self.args.device)
            with evaluating(alignment.student_block):
                output = run_block(alignment.student_block, call, given, alignment.input_projector)
            teacher = alignment.teacher_features(answer.outputs[alignment.teacher_module_name])
            alignment.make_output_projector(alignment.student_features(output), teacher)

    # ---- losses --------------------------------------------------------------------------

    def student_terms(
        self, model: nn.Module, inputs: dict[str, Any], ticket: Ticket, with_task: bool, with_outputs: bool
    ) -> tuple[Any, dict[str, LossTerm]]:
        ticket.start()
        outputs, task = None, None
        if with_task or with_outputs:
            outputs, task = self._student_forward(model, inputs, with_task)

        def run(forward: Any, **given: Any) -> dict[str, LossTerm]:
            calls = self._calls(forward, given)
            with self.accelerator.autocast():
                return dict(self._block_terms(calls, inputs, ticket))

        with overridden_forward(self.student_model, run):
            terms: dict[str, LossTerm] = dict(model(**self._student_inputs(inputs)))
        return outputs, terms if task is None else {**terms, "hard": task}

    def _block_terms(
        self, calls: Mapping[nn.Module, BlockCall], inputs: Mapping[str, Any], ticket: Ticket
    ) -> Iterator[tuple[str, LossTerm]]:
        """One block's loss after the other; the teacher's tensors of a block are let go when it is done."""
        answer = self._answer(ticket)
        grids = self.grid_rule.grids(inputs)
        last = {alignment.teacher_module_name: number for number, alignment in enumerate(self.alignments)}
        for number, alignment in enumerate(self.alignments):
            name = alignment.teacher_module_name
            given = answer.inputs[name]
            if self.args.deepcopy_captured_args_and_kwargs:
                given = given.clone()
            version = version_of(given)
            output = run_block(
                alignment.student_block, calls[alignment.student_block], given, alignment.input_projector
            )
            if version_of(given) != version and not self.args.deepcopy_captured_args_and_kwargs:
                check_unwritten("student", [alignment.student_module_name])
            teacher = alignment.teacher_features(answer.outputs[name])
            student = alignment.student_features(output)
            del output
            term = self.term(number, student, teacher, grids, answer.borrowed)
            del student, teacher
            if last[name] == number:
                del answer.inputs[name], answer.outputs[name]
            yield self.names[number], term

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The sum of all blocks' losses; with ``backward_per_block`` each has had its backward pass already."""
        if not (self.args.backward_per_block and torch.is_grad_enabled() and model.training):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        ticket = self.ticket_of(inputs, num_items_in_batch)
        self.data_position = ticket.random_state_after or self.data_position
        inputs = self.prepared(inputs, ticket)
        ticket.start()
        # Not through DDP: it would wait for the gradients of all blocks at once. They are averaged below instead.
        with self.accelerator.autocast():
            calls = self._calls(self.student_model.forward, self._student_inputs(inputs))
        total = torch.zeros((), device=self.args.device)
        reported = torch.zeros_like(total)
        blocks = self._block_terms(calls, inputs, ticket)
        while True:
            with self.accelerator.autocast():
                name, term = next(blocks, (None, None))
            if name is None or term is None:
                break
            if ticket.repeated:
                term = LossTerm(term.mean, 0, term.kind, term.weight)
            share = self._share(term, ticket)
            self.training_meter.add(name, term.mean * share)
            loss = weighted(term, share, 0.0, self.args.magnitude_aware_weighting)
            self.accelerator.backward(loss)
            total = total + loss.detach()
            reported = reported + weighted(term, share, 0.0, False).detach()
            del loss, term
        ticket.release()
        if self.args.magnitude_aware_weighting:
            self._reported_loss = reported
        if self.accelerator.sync_gradients:
            self._average_gradients()
        # Trainer runs a backward pass through what it gets; there is nothing left to do in it.
        loss = total + torch.zeros((), device=total.device, requires_grad=True)
        return (loss, None) if return_outputs else loss

    def _average_gradients(self) -> None:
        if self.args.world_size == 1:
            return
        # All of them, on every rank: which parts of a block run may depend on a rank's own batch.
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for dtype in sorted({p.grad.dtype for p in parameters}, key=str):
            gradients = [p.grad for p in parameters if p.grad.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            torch.distributed.all_reduce(flat)
            flat /= self.args.world_size
            for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))

    # ---- logs and checkpoints ------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update({f"grad_norm/{name}": norm.item() for name, norm in self._gradient_norms.items()})
            logs.update({f"learning_rate/{name}": rate for name, rate in self._rates.items()})
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save and self.student_models:
            save_named_students(output_dir or self.args.output_dir, self.student_models, self.student_model)
