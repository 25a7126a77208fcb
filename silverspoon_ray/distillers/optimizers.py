"""Several optimizers, stepped as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from silverspoon_ray.alignments.alignment import Alignment


class OptimizerSet(Optimizer):
    """The distiller's optimizer and those that alignments bring along.

    To whoever uses it (the Trainer, accelerate, schedulers) it is one optimizer with all their parameter groups.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        # Not the base's constructor, which would make groups of its own: these are the members' own dictionaries, so
        # that a learning rate set here is the one they use.
        self.defaults: dict[str, Any] = dict(self.optimizers[0].defaults)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: value for optimizer in self.optimizers for key, value in optimizer.state.items()}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def __repr__(self) -> str:
        return f"OptimizerSet({self.optimizers!r})"


class SchedulerSet(LRScheduler):
    """The distiller's scheduler and those that alignments bring along; logs show the distiller's."""

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self.schedulers = list(schedulers)
        self.optimizer = self.schedulers[0].optimizer

    def step(self, epoch: int | None = None) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def get_last_lr(self) -> list[float | torch.Tensor]:
        return [rate for scheduler in self.schedulers for rate in scheduler.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)


def parameters_of(alignment: Alignment) -> list[nn.Parameter]:
    """What an alignment trains: its block and its projectors, each parameter once, frozen ones left out."""
    modules = [alignment.student_block, *alignment.trained_modules.values()]
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return list(found.values())


def by_alignment(optimizer: Optimizer, alignments: Sequence[Alignment]) -> None:
    """Divide an optimizer's groups so that each alignment's parameters have groups of their own; the rest is dropped.

    A group per alignment is the same mathematics as an optimizer per alignment, with one state to save. Groups that
    differ in their settings (weight decay) stay apart.
    """
    owner = {id(p): number for number, a in reversed(list(enumerate(alignments))) for p in parameters_of(a)}
    groups = []
    for number in range(len(alignments)):
        for group in optimizer.param_groups:
            own = [p for p in group["params"] if owner.get(id(p)) == number]
            if own:
                groups.append({**group, "params": own, "alignment": number})
    optimizer.param_groups[:] = groups


def with_own_optimizers(optimizer: Optimizer, alignments: Sequence[Alignment]) -> Optimizer:
    """Let alignments that bring an optimizer use it, for their parameters and no others.

    Projectors made after that optimizer are added to it.
    """
    brought = [a for a in alignments if a.optimizer is not None]
    if not brought:
        return optimizer
    taken = set()
    for alignment in brought:
        assert alignment.optimizer is not None
        held = {id(p) for group in alignment.optimizer.param_groups for p in group["params"]}
        new = [
            p for projector in alignment.trained_modules.values() for p in projector.parameters() if id(p) not in held
        ]
        if new:
            alignment.optimizer.add_param_group({"params": new})
        taken |= held | {id(p) for p in new}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in taken]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    own = list({id(a.optimizer): a.optimizer for a in brought if a.optimizer is not None}.values())
    return OptimizerSet([optimizer, *own] if optimizer.param_groups else own)


def gradient_norm(parameters: Sequence[nn.Parameter], clip_to: float | None) -> torch.Tensor:
    """The norm of the parameters' gradients, which are scaled down to ``clip_to`` where that is smaller."""
    return nn.utils.clip_grad_norm_(list(parameters), float("inf") if clip_to is None else clip_to)
