"""HolisticDistiller: the student's intermediate activations learn from the teacher's, through the whole student."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from silverspoon_ray.alignments.alignment import Alignment
from silverspoon_ray.capture import ForwardTruncated, ModuleCaptureEngine, version_of
from silverspoon_ray.distillers.base import PrepareInputs
from silverspoon_ray.distillers.features import FeatureDistiller
from silverspoon_ray.distillers.grids import Grid
from silverspoon_ray.distillers.optimizers import parameters_of
from silverspoon_ray.distillers.terms import LossTerm
from silverspoon_ray.distillers.trunk import overridden_forward
from silverspoon_ray.errors import AlignmentError, ConfigError
from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.local import evaluating
from silverspoon_ray.teacher.lookahead import Ticket
from silverspoon_ray.teacher.protocol import Teacher, TeacherOutput
from silverspoon_ray.teacher.wanted import check_unwritten
from silverspoon_ray.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)


class HolisticDistiller(FeatureDistiller):
    """Outputs of the student's modules learn from outputs of the teacher's (FitNets, Romero et al. 2015,
    arXiv:1412.6550; with several layers as in TinyBERT, arXiv:1909.10351).

    Both models run whole and one backward pass goes through the student, so that every layer learns from all
    alignments above it. Logged are ``loss/<alignment name>`` for each alignment (unweighted), and with ``alpha`` above
    0 ``loss/alignment`` (their weighted sum) and ``loss/hard``; the same under ``eval_``.

    Args:
        student_model: the model to train.
        teacher_model: a module, or the handle of a ``TeacherGroup``.
        alignments: what learns from what; :func:`~silverspoon_ray.create_alignments` makes them.
        train_dataset, eval_dataset, data_collator: as for ``Trainer``.
        args: the training arguments.
        auto_truncate: stop the student's forward after the last aligned module, where nothing needs its outputs: no
            task loss, no metrics. The first batch runs whole; a module that fires more than once in it is not cut off.
        prepare_teacher_inputs, prepare_student_inputs: see :class:`BaseDistiller`.
        overlap_alignment_loss: compute the alignments' losses on a CUDA stream of their own, beside the student's
            forward. On the CPU it changes nothing.
        kwargs: further keywords of ``transformers.Trainer``.
    """

    kind = "holistic"

    def __init__(
        self,
        student_model: nn.Module,
        teacher_model: nn.Module | Teacher,
        alignments: Sequence[Alignment],
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Any = None,
        args: TrainingArguments | None = None,
        auto_truncate: bool = False,
        prepare_teacher_inputs: PrepareInputs | None = None,
        prepare_student_inputs: PrepareInputs | None = None,
        overlap_alignment_loss: bool = False,
        **kwargs: Any,
    ) -> None:
        self.auto_truncate = auto_truncate
        self.overlap_alignment_loss = overlap_alignment_loss
        self.fires_per_forward: dict[int, int] = {}
        super().__init__(
            teacher_model=teacher_model,
            alignments=alignments,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=data_collator,
            prepare_teacher_inputs=prepare_teacher_inputs,
            prepare_student_inputs=prepare_student_inputs,
            model=student_model,
            **kwargs,
        )
        self._side_stream: torch.cuda.Stream | None = None
        if overlap_alignment_loss and self.args.device.type == "cuda":
            self._side_stream = torch.cuda.Stream(self.args.device)
        elif overlap_alignment_loss:
            logger.warning("overlap_alignment_loss=True has no effect on %s: it needs CUDA.", self.args.device)

    def see_shapes(self, inputs: dict[str, Any], answer: TeacherOutput) -> None:
        student: nn.Module = self.student_model
        blocks = [alignment.student_block for alignment in self.alignments]
        with evaluating(student), ModuleCaptureEngine(student, blocks, capture_inputs=False) as engine:
            self._student_forward(student, inputs, with_task=False)
        check_all_ran(self.names, engine.captured_outputs)
        for number, alignment in enumerate(self.alignments):
            alignment.make_output_projector(
                alignment.student_features(engine.get_captured(number)[2]),
                alignment.teacher_features(answer.outputs[alignment.teacher_module_name]),
            )

    def student_terms(
        self, model: nn.Module, inputs: dict[str, Any], ticket: Ticket, with_task: bool, with_outputs: bool
    ) -> tuple[Any, dict[str, LossTerm]]:
        comparison = Comparison(self, ticket, self.grid_rule.grids(inputs))
        if self.args.overlap_teacher_forward is False:
            comparison.wait()
        else:
            ticket.start()
        # A module that fires more than once must not be cut off at its first: that shows in the first batch.
        once = bool(self.fires_per_forward) and set(self.fires_per_forward.values()) == {1}
        truncate = self.auto_truncate and once and not with_task and not with_outputs
        compared = ComparedStudent(self, model, comparison, truncate, keeps_graph=with_task or with_outputs)
        outputs, task = self._student_forward(compared, inputs, with_task)  # type: ignore[arg-type]
        terms = compared.terms
        return outputs, terms if task is None else {**terms, "hard": task}


class Comparison:
    """The losses of one batch, each computed as soon as the student's module has fired and the answer is there.

    Args:
        distiller: whose alignments are compared.
        ticket: the batch's claim on the answer.
        grids: the batch's.
    """

    def __init__(self, distiller: HolisticDistiller, ticket: Ticket, grids: Mapping[str, Grid]) -> None:
        self.distiller = distiller
        self.ticket = ticket
        self.grids = grids
        self.answer: TeacherOutput | None = None
        self.students: dict[int, tuple[torch.Tensor, int]] = {}
        """Features that wait for the teacher's, with their version at that time."""
        self.learns = torch.is_grad_enabled()
        self.terms: dict[int, LossTerm] = {}
        self.fires: Counter[int] = Counter()
        self._users: Counter[str] = Counter(a.teacher_module_name for a in distiller.alignments)

    def wait(self) -> None:
        """Have the answer, however long it takes."""
        if self.answer is None:
            self.answer = self.distiller._answer(self.ticket)

    def fired(self, number: int, args: Any, output: Any) -> None:
        """A module of the student has returned."""
        alignment = self.distiller.alignments[number]
        if self.learns and not torch.is_grad_enabled() and parameters_of(alignment):
            raise ConfigError(
                "use_reentrant",
                True,
                f"False: {alignment.student_module_name!r} runs without gradients, and what it gives cannot teach it",
            )
        self.fires[number] += 1
        features = alignment.student_features(output)
        if self.distiller.args.deepcopy_captured_args_and_kwargs:
            features = features.clone()
        # Autograd runs backward in the order in which nodes were made. A node made now, whenever the loss behind it is
        # computed, gives gradients one order of summation: early and late answers teach bit for bit the same.
        self.students[number] = (features.view_as(features), version_of(features))
        # A module may fire more than once; its last output counts. Then all is compared at the end.
        is_last = self.distiller.fires_per_forward.get(number) == 1
        if number in self.terms:
            raise AlignmentError(
                "student_block",
                alignment.get_name(),
                "a module that fires as often in every batch; it fired once before",
            )
        # In a checkpointed region every operation is repeated in the backward pass; a loss computed here would not be.
        if is_last and not _in_checkpoint() and (self.answer is not None or self.ticket.is_there):
            self._compare(number)

    def finish(self) -> dict[str, LossTerm]:
        """The losses that had to wait until now, and all of them by name."""
        for number in sorted(self.students):
            self._compare(number)
        self.distiller.fires_per_forward = dict(self.fires)
        if self.distiller._side_stream is not None:
            torch.cuda.current_stream().wait_stream(self.distiller._side_stream)
        check_all_ran(self.distiller.names, self.terms)
        return {name: self.terms[number] for number, name in enumerate(self.distiller.names)}

    def _compare(self, number: int) -> None:
        self.wait()
        assert self.answer is not None
        alignment = self.distiller.alignments[number]
        student, version = self.students.pop(number)
        if version_of(student) != version:
            check_unwritten("student", [alignment.student_module_name])
        name = alignment.teacher_module_name
        self._users[name] -= 1
        output = self.answer.outputs[name] if self._users[name] > 0 else self.answer.outputs.pop(name)
        teacher = alignment.teacher_features(output)
        with self._stream():
            self.terms[number] = self.distiller.term(number, student, teacher, self.grids, self.answer.borrowed)

    def _stream(self) -> AbstractContextManager[Any]:
        side = self.distiller._side_stream
        if side is None:
            return nullcontext()
        side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(side)


class ComparedStudent:
    """The student as something to call: its forward compares on the way and hands back only what the task loss needs.

    The losses are part of what the student's own forward returns, because DDP looks there for the parameters that take
    part; the wrapper takes them out again.
    """

    def __init__(
        self, distiller: HolisticDistiller, model: nn.Module, comparison: Comparison, truncate: bool, keeps_graph: bool
    ) -> None:
        self.distiller = distiller
        self.model = model
        self.comparison = comparison
        self.truncate = truncate
        self.keeps_graph = keeps_graph
        self.terms: dict[str, LossTerm] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.distiller.student_model, name)

    def __call__(self, **inputs: Any) -> Any:
        student = self.distiller.student_model
        with overridden_forward(student, self._run):
            returned = self.model(**inputs)
        found: dict[str, LossTerm] = returned["terms"]
        self.terms = found
        return returned["outputs"]

    def _run(self, forward: Any, **inputs: Any) -> dict[str, Any]:
        distiller = self.distiller
        engine = ModuleCaptureEngine(
            distiller.student_model,
            [alignment.student_block for alignment in distiller.alignments],
            output_callback=self.comparison.fired,
            detach_outputs=False,
            capture_inputs=False,
            auto_truncate=self.truncate,
        )
        with engine:
            engine.begin()  # the student's own call has begun already
            try:
                outputs = forward(**inputs)
            except ForwardTruncated:
                outputs = None
            engine.clear_captured()
        with distiller.accelerator.autocast():
            terms = self.comparison.finish()
        if not self.keeps_graph:
            outputs = map_tensors(torch.Tensor.detach, outputs)
        return {"outputs": outputs, "terms": terms}


def check_all_ran(names: Sequence[str], seen: Collection[int]) -> None:
    """Raise an AlignmentError where the number of a name is not among ``seen``."""
    missing = [name for number, name in enumerate(names) if number not in seen]
    if missing:
        raise AlignmentError("student_block", missing[0], "a module that runs in the student's forward; it did not")


def _in_checkpoint() -> bool:
    """Whether what is computed now is inside ``torch.utils.checkpoint``, or some other saving of tensors."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None
