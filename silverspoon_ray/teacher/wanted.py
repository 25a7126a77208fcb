"""What a request asks of a model, and how it becomes an answer; the same for a whole model and for a stage of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from silverspoon_ray.capture import NamedCaptures, capturing
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.targets import sampled_targets, top_k_targets
from silverspoon_ray.models.output_head import explains, output_head, output_head_name
from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.content import sample_uniforms
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest


class Wanted:
    """One request's share of a model.

    Args:
        model: the model, or the part of it that is here.
        request: what is wanted of the whole model.
        outputs, inputs: those of the request's modules that fire here.
        ends_here: the model's forward ends here, so logits or the last hidden state come from here.

    Raises:
        ConfigError: the last hidden state is wanted of a model without an output head.
    """

    def __init__(
        self,
        model: nn.Module,
        request: TeacherRequest,
        outputs: Sequence[str] | None = None,
        inputs: Sequence[str] | None = None,
        ends_here: bool = True,
    ) -> None:
        self.model = model
        self.request = request
        self.outputs = tuple(request.outputs if outputs is None else outputs)
        self.asked_inputs = tuple(request.inputs if inputs is None else inputs)
        self.head = required_head(model) if request.logits == "hidden" and ends_here else None
        self.inputs = tuple(dict.fromkeys((*self.asked_inputs, *([] if self.head is None else [self.head]))))
        self.needs_end = ends_here and request.logits not in (None, "hidden")
        self._events: int | None = None
        self._verified = False

    def capturing(self, whole: bool = False) -> AbstractContextManager[NamedCaptures]:
        """Hooks for one forward, which ends with the last module that is wanted unless the rest is needed.

        The first forward runs whole, to see how often the wanted modules fire.
        """
        until = None if whole or self.needs_end else self._events
        return capturing(self.model, self.outputs, self.inputs, self.request.copies, until)

    def answer(self, captured: NamedCaptures, returned: Any, batch: Mapping[str, Any]) -> TeacherOutput:
        """The answer, or this part of it.

        Args:
            captured: of the forward that has just run.
            returned: what the forward returned; None where it ended early.
            batch: what the forward was called with.

        Raises:
            ConfigError: a wanted module did not run; the model writes to captured tensors; what is behind its output
                head is unknown.
        """
        outputs, inputs = captured.outputs, captured.inputs
        # A module that fires more than once may fire as often as the batch is long: then nothing is cut short.
        if captured.engine.events == len(self.outputs) + len(self.inputs):
            self._events = captured.engine.events
        check_unwritten("teacher", captured.written_to)
        missing = [name for name in self.outputs if name not in outputs]
        missing += [name for name in self.inputs if name not in inputs]
        if missing:
            raise ConfigError("outputs", missing[0], "a module that runs in the teacher's forward; this one did not")
        answer = TeacherOutput()
        if self.head is not None:
            hidden = inputs[self.head] if self.head in self.asked_inputs else inputs.pop(self.head)
            hidden = whole_tensor(hidden)
            if returned is not None:
                self._verify_head(hidden, returned)
            wire = self.request.wire_dtype
            answer.soft_targets = {"hidden": hidden if wire is None else hidden.to(wire)}
        for name, select in self.request.selectors:
            if name in outputs:
                outputs[name] = select(outputs[name])
        answer.outputs = map_tensors(whole_tensor, outputs)
        answer.inputs = map_tensors(whole_tensor, inputs)
        if self.needs_end:
            self._add_logits(answer, whole_tensor(extract_logits(returned)), batch)
        return answer

    def _add_logits(self, answer: TeacherOutput, logits: torch.Tensor, batch: Mapping[str, Any]) -> None:
        request = self.request
        if request.logits == "full":
            answer.logits = logits
            return
        logits = logits[..., : request.classes]
        if request.logits == "top_k":
            targets: Any = top_k_targets(logits, request.top_k, request.temperature)
        else:
            uniforms = sample_uniforms(batch, tuple(logits.shape[:-1]), request.seed).to(logits.device)
            targets = sampled_targets(logits, request.top_k, request.temperature, uniforms)
        half = request.wire_dtype in (torch.float16, torch.bfloat16)
        # Not bfloat16: a log-probability of -10 would be off by 3 %.
        log_probs = targets.log_probs.to(torch.float16) if half else targets.log_probs
        answer.soft_targets = {"indices": targets.indices, "log_probs": log_probs}

    def _verify_head(self, hidden: torch.Tensor, returned: Any) -> None:
        """Once: the logits are what the student side will make of the hidden state."""
        assert self.head is not None
        weight = self.model.get_submodule(self.head).weight
        if self._verified or isinstance(weight, DTensor):
            return
        if not explains(output_head(self.model, self.head), hidden, whole_tensor(extract_logits(returned))):
            raise ConfigError(
                "teacher_logits",
                "hidden",
                f'"full" or "top_k": {type(self.model).__name__} does more behind its {self.head} than scale its '
                "logits and cap them softly",
            )
        self._verified = True


def required_head(model: nn.Module) -> str:
    """See :func:`output_head_name`.

    Raises:
        ConfigError: there is none.
    """
    name = output_head_name(model)
    if name is None:
        raise ConfigError(
            "teacher_logits", "hidden", f'"full": {type(model).__name__} has no linear output head that is known'
        )
    return name


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Without a graph, and whole: of a tensor that is spread over devices this rank holds a part only."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_unwritten(whose: str, names: Sequence[str]) -> None:
    """Raise a ConfigError where modules' inputs or outputs are not what they were when they were captured."""
    if names:
        raise ConfigError(
            "deepcopy_captured_args_and_kwargs",
            False,
            f"True: the {whose} writes in place to what its module {names[0]!r} gets or gives",
        )


def extract_logits(returned: Any) -> torch.Tensor:
    """The logits in what a model's forward returned: the tensor itself, ``.logits``, or the first tensor.

    Raises:
        ConfigError: there are none.
    """
    if isinstance(returned, torch.Tensor):
        return returned
    logits = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    values = list(returned.values()) if isinstance(returned, Mapping) else returned
    if isinstance(values, tuple | list):
        for value in values:
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                return value
    raise ConfigError("model", type(returned).__name__, "a model whose output is a tensor or has `logits`")
