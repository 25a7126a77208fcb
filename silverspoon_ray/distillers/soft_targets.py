"""What came instead of the teacher's logits, as something to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from silverspoon_ray.distillers.vocabulary import vocabulary_size
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses import JSDLoss, KLDivergenceLoss
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.losses.targets import HiddenTargets, LogitTargets, SampledTargets, SoftTargets, TopKTargets
from silverspoon_ray.teacher.protocol import GivesHead, Teacher, TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.wanted import required_head


def is_ours(loss: Any) -> bool:
    """It is a divergence of this package as it is: what a subclass computes, only the subclass knows."""
    return type(loss) in (KLDivergenceLoss, JSDLoss)


def check_form(form: str, loss: Any) -> None:
    """Refuse a loss that cannot be computed from what travels.

    Args:
        form: see :class:`TeacherRequest`.
        loss: the soft loss.

    Raises:
        ConfigError: it needs more of the teacher's distribution than the form has.
    """
    if form in ("top_k", "sampled") and not is_ours(loss):
        raise ConfigError("teacher_logits", form, '"full" or "hidden" for a soft_loss_fn of your own')
    if form == "sampled" and (isinstance(loss, JSDLoss) or loss.reverse):
        raise ConfigError(
            "teacher_logits",
            form,
            '"full", "hidden" or "top_k" with this soft_loss_fn: only the forward KL divergence is linear in the '
            "teacher's probabilities, so that an unbiased sample of them gives an unbiased loss",
        )


def check_soft_targets(form: str, loss: Any, teacher: nn.Module | None) -> None:
    """:func:`check_form`, and where the teacher's structure is known that it has what the form needs.

    Raises:
        ConfigError: of the key ``teacher_logits``.
    """
    check_form(form, loss)
    if form == "hidden" and teacher is not None:
        required_head(teacher)


def bytes_per_token(request: TeacherRequest, teacher: nn.Module) -> int:
    """What a position takes on the wire; an upper bound where it depends on the position.

    Args:
        request: what is asked for instead of logits.
        teacher: the teacher's model or its structure, whose dtype decides where the request names none.
    """
    dtype = request.wire_dtype or next(teacher.parameters()).dtype
    classes = vocabulary_size(getattr(teacher, "config", None)) or 0
    if request.logits == "full":
        return classes * dtype.itemsize
    if request.logits == "hidden":
        head: Any = teacher.get_submodule(required_head(teacher))
        return int(head.in_features) * dtype.itemsize
    classes = min(classes, request.classes or classes)
    index, log_prob = (2 if classes <= 65536 else 4), (2 if dtype.itemsize == 2 else 4)
    if request.logits == "top_k":
        k = min(request.top_k, classes)
        return k * index + (k + 1) * log_prob
    return request.top_k * (index + log_prob)


class SoftTargetReader:
    """Reads answers of a teacher.

    Args:
        teacher: who answers.
        request: what it was asked for.
        device: the student's, where the teacher's output head goes if it is needed.

    Raises:
        ConfigError: the last hidden state is wanted of a teacher without a known output head.
    """

    def __init__(self, teacher: Teacher, request: TeacherRequest, device: torch.device) -> None:
        self.teacher = teacher
        self.form = request.logits
        self.device = device
        self._head: OutputHead | None = None
        if self.form == "hidden":
            required_head(teacher.structure)
            if not isinstance(teacher, GivesHead):
                raise ConfigError(
                    "teacher_logits", "hidden", f'"full"; a {type(teacher).__name__} gives no output head'
                )

    @property
    def head(self) -> OutputHead:
        """The teacher's, fetched once."""
        if self._head is None:
            assert isinstance(self.teacher, GivesHead)
            self._head = self.teacher.output_head().to(self.device)
        return self._head

    def targets(self, answer: TeacherOutput) -> SoftTargets:
        """What the student's logits are compared with."""
        parts = answer.soft_targets
        if self.form == "hidden":
            return HiddenTargets(parts["hidden"].to(self.head.weight.dtype), self.head)
        if self.form == "top_k":
            return TopKTargets(parts["indices"], parts["log_probs"])
        if self.form == "sampled":
            return SampledTargets(parts["indices"], parts["log_probs"])
        assert answer.logits is not None
        return LogitTargets(answer.logits)

    def logits(self, answer: TeacherOutput, owned: bool) -> torch.Tensor:
        """The teacher's logits in full, for losses that need them; ``owned``: free to be written to."""
        if self.form == "hidden":
            return self.head.logits(answer.soft_targets["hidden"].to(self.head.weight.dtype))
        logits = (answer.owned() if owned else answer).logits
        assert logits is not None
        return logits
