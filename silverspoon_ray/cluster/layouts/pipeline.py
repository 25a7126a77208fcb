"""A pipeline: each device holds some layers, batches pass from one to the next, several at a time."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import ray
import torch
from torch import nn

from silverspoon_ray.cluster.codec import Encoded, decode, encode, encode_output
from silverspoon_ray.cluster.transport.collective import Posted, ReplyTo
from silverspoon_ray.cluster.worker import TeacherSpec, TeacherWorker, describe_batch, resident_bytes
from silverspoon_ray.errors import ConfigError, SilverspoonError, TeacherError
from silverspoon_ray.models.partial import keep_part, load_part
from silverspoon_ray.models.source import build_model, known_structure
from silverspoon_ray.models.structure import structure_of
from silverspoon_ray.teacher.cache.identity import digests_of
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.pipeline import Handover, PipelineStage, own_tensors
from silverspoon_ray.teacher.protocol import TeacherRequest
from silverspoon_ray.teacher.stages import PipelinePlan, plan_pipeline

# The number of a batch that nobody wants the answer to.
EXAMPLE = 0


class TeacherStage(TeacherWorker):
    """One stage of a replica.

    Args:
        spec: the teacher.
        rank: of this process in the group.
        number: of the stage in its replica.
        stages: how many there are.
    """

    def __init__(self, spec: TeacherSpec, rank: int, number: int, stages: int) -> None:
        super().__init__(spec, rank)
        self.number = number
        self.stages = stages
        self.stage: PipelineStage | None = None
        self._structure: nn.Module | None = None

    def ready(self) -> dict[str, Any]:
        self._loaded_stage()
        return self.stats()

    def plan(self) -> PipelinePlan:
        return self._loaded_stage().plan

    def structure(self) -> nn.Module:
        self._loaded_stage()
        assert self._structure is not None
        return self._structure

    def output_head(self) -> Encoded:
        return encode(vars(LocalTeacher(self._loaded_stage().model).output_head()))

    def weight_digests(self) -> dict[str, str]:
        stage = self._loaded_stage()
        return digests_of(stage.model, own_tensors(stage.model, stage.plan, self.number))

    def weights(self) -> dict[str, Any]:
        held = {} if self.stage is None else {"weight_bytes": resident_bytes(self.stage.model)}
        return {"stage": self.number, **held}

    def run(
        self,
        batch: Encoded,
        request: TeacherRequest,
        number: int,
        received: Encoded | None,
        hand_on: bool,
        reply_to: ReplyTo | None = None,
    ) -> tuple[Encoded, Encoded | Posted] | Encoded | Posted:
        """This stage's part of a forward.

        Args:
            batch: the model's keyword arguments.
            request: what is wanted.
            number: the student's count of its batches; :data:`EXAMPLE`: it is to show whether this
                model can be cut at all.
            received: from the stage before.
            hand_on: a later stage runs too.
            reply_to: where the answer's tensors are to go; None: with what is returned.

        Returns:
            with ``hand_on`` what the next stage needs and the answer's part, else that part alone.

        Raises:
            TeacherError: with the traceback, this stage and the batch.
            ConfigError: this model cannot be cut, seen in an example.
        """
        stage = self._loaded_stage()
        begin = time.perf_counter()
        try:
            handed = None if received is None else Handover(**self._here(received))
            left, answer = stage.run(self._here(batch), request, handed, hand_on, remember=number != EXAMPLE)
            encoded = encode_output(answer, request.wire_dtype, arrays=reply_to is None)
            del answer  # whoever holds its memory while it waits to be sent makes a copy necessary
            passed = None if left is None else encode(vars(left))
        except Exception as error:
            if number == EXAMPLE and isinstance(error, ConfigError):
                raise
            raise TeacherError(
                f"stage {self.number} of the teacher raised {type(error).__name__}: {error}",
                rank=self.rank,
                batch=describe_batch(batch, number),
                remote_traceback=traceback.format_exc(),
            ) from None
        if number != EXAMPLE:
            self.forwards += 1
            self.nbytes += encoded.nbytes
            self.busy_s += time.perf_counter() - begin
        part = self.outbox.post(encoded, number, reply_to)
        return part if passed is None else (passed, part)

    def _here(self, encoded: Encoded) -> dict[str, Any]:
        """On this stage's device; arguments in the object store are shared memory, and models may write to theirs."""
        values = decode(encoded)
        return {k: v.to(self.device, copy=True) if isinstance(v, torch.Tensor) else v for k, v in values.items()}

    def _loaded_stage(self) -> PipelineStage:
        if self.stage is None:
            try:
                self.stage = self._load_stage()
            except SilverspoonError:
                raise
            except Exception as error:
                raise TeacherError(
                    f"stage {self.number} of the teacher could not be loaded: {type(error).__name__}: {error}",
                    rank=self.rank,
                    remote_traceback=traceback.format_exc(),
                ) from None
        return self.stage

    def _load_stage(self) -> PipelineStage:
        self._choose_device()
        structure = None if self.spec.source is None else known_structure(self.spec.source)
        if structure is not None and self.spec.source is not None:
            plan = plan_pipeline(structure, self.stages)
            own = own_tensors(structure, plan, self.number)
            model = load_part(self.spec.source, own, self.device, **self.spec.load_kwargs)
        else:
            model = self._whole_model()
            plan = plan_pipeline(model, self.stages)
            keep_part(model, own_tensors(model, plan, self.number), self.device)
        self._structure = structure_of(model)
        stage = PipelineStage(model.eval(), plan, self.number)
        stage.compiled = self._compiled(model, plan.stages[self.number].layers)
        return stage

    def _whole_model(self) -> nn.Module:
        if self.spec.module is not None:
            model: nn.Module = ray.get(self.spec.module)
            return model
        assert self.spec.source is not None
        return build_model(self.spec.source, "teacher", **self.spec.load_kwargs)


def ask_pipeline(
    stages: list[Any],
    plan: PipelinePlan,
    batch: Any,
    request: TeacherRequest,
    number: int,
    reply_to: ReplyTo | None = None,
) -> list[ray.ObjectRef]:
    """Send a batch down a pipeline, as far as it has to go.

    Each stage's answer goes straight to who asked; only the hidden state passes from stage to stage.

    Returns:
        references of the parts of the answer.
    """
    wanted = {plan.stage_of(name) for name in (*request.outputs, *request.inputs)}
    wanted |= {len(stages) - 1} if request.logits else set()
    deepest = max(wanted, default=0)
    parts = []
    received: Any = None
    for number_of_stage, stage in enumerate(stages[: deepest + 1]):
        hand_on = number_of_stage < deepest
        run: Callable[..., Any] = stage.run.options(num_returns=2 if hand_on else 1).remote
        returned = run(batch, request, number, received, hand_on, reply_to)
        received, part = returned if hand_on else (None, returned)
        if number_of_stage in wanted:
            parts.append(part)
    return parts
