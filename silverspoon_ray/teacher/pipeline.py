"""One stage of a pipeline: a model's own forward, of which only some layers do anything.

Every stage runs the forward of the whole model, so that masks, position embeddings and whatever else a family of models
does around its layers needs no special case. Layers of earlier stages hand on what they get, modules before them give
tensors of the right shape without having weights, the hidden state of the stage before goes in at the first own layer,
and the forward ends where the next stage's first layer is called.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from silverspoon_ray.capture import ForwardTruncated, first_tensor
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.structure import structure_of
from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.compiled import CompiledLayers, running
from silverspoon_ray.teacher.local import evaluating
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.stages import PipelinePlan, modules_below
from silverspoon_ray.teacher.wanted import Wanted


@dataclass
class Handover:
    """What a stage gives the next one.

    Attributes:
        hidden: the hidden state ``[batch, ..., width]`` behind its last layer.
        others: what a layer returns in a tuple behind the hidden state: shape and dtype of a tensor (attention
            weights, say), None for anything else. None: it returns the hidden state itself.
    """

    hidden: torch.Tensor
    others: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...] | None


def own_tensors(model: nn.Module, plan: PipelinePlan, number: int) -> set[str]:
    """Names of the parameters and saved buffers that a stage holds.

    Args:
        model: the model or its structure.
        plan: how it is cut.
        number: the stage.
    """
    last = number == len(plan.stages) - 1
    modules = [*plan.stages[number].layers, *(plan.before if number == 0 else ())]
    modules += [*plan.after, *plan.both] if last else []
    names = set()
    for name, module in modules_below(model, modules):
        names |= {f"{name}.{own}" for own, _ in (*module.named_parameters(recurse=False), *module._buffers.items())}
    # What containers hold themselves (a position embedding beside the layers, say) is small, and used on every stage.
    path = plan.stack.split(".") if plan.stack else []
    for depth in range(len(path) + 1):
        parent = ".".join(path[:depth])
        module = model.get_submodule(parent)
        own_of_parent = (*module.named_parameters(recurse=False), *module._buffers.items())
        names |= {f"{parent}.{own}" if parent else own for own, _ in own_of_parent}
    return names


class PipelineStage:
    """The part of a teacher that one device holds.

    Args:
        model: with the memory of :func:`own_tensors` only; its forwards are overridden here.
        plan: how it is cut.
        number: which stage this is.
    """

    def __init__(self, model: nn.Module, plan: PipelinePlan, number: int) -> None:
        self.model = model
        self.plan = plan
        self.number = number
        self.is_last = number == len(plan.stages) - 1
        self.structure = structure_of(model)
        self._received: Handover | None = None
        self._left: torch.Tensor | None = None
        self._others: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...] | None = None
        self._entered = False
        self._verified = number == 0
        self.compiled: CompiledLayers | None = None
        """Set, this stage's layers run compiled, unless in an example."""
        self._wanted: dict[TeacherRequest, Wanted] = {}
        own = plan.stages[number].layers
        first = plan.layers.index(own[0])
        for name in plan.layers[:first]:
            model.get_submodule(name).forward = self._pass_over
        if not self.is_last:
            model.get_submodule(plan.layers[first + len(own)]).forward = self._stop
        if number > 0:
            for name in plan.before:
                if not (self.is_last and name in plan.both):
                    self._replace_by_shapes(name)
            model.get_submodule(own[0]).register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self.is_last:
            for name in plan.after:
                self._refuse_early(name)
        model.get_submodule(own[-1]).register_forward_hook(self._note_form)

    @torch.no_grad()
    def run(
        self,
        batch: Mapping[str, Any],
        request: TeacherRequest,
        received: Handover | None,
        hand_on: bool,
        remember: bool = True,
    ) -> tuple[Handover | None, TeacherOutput]:
        """This stage's part of a forward.

        Args:
            batch: the model's keyword arguments, on this stage's device.
            request: what is wanted of the whole model; the stage answers what falls to it.
            received: from the stage before; None for the first.
            hand_on: whether a later stage runs too.
            remember: a forward that shows nothing wrong is the last that is looked at for it. Unset for an example,
                which may take another way through the model than real batches do.

        Returns:
            what the next stage needs (None without ``hand_on``), and the answer's part.
        """
        wanted = self._wanted_of(request)
        self._received, self._left, self._entered = received, None, False
        compiling = running(self.compiled if remember else None, (*request.outputs, *request.inputs))
        with evaluating(self.model), wanted.capturing(whole=hand_on) as captured, compiling:
            answer = wanted.answer(captured, captured.forward(**batch), batch)
        self._received = None
        left, self._left = self._left, None
        if not self._verified:
            self._check_no_leak(received, left, answer)
            self._verified = remember
        if not hand_on:
            return None, answer
        if left is None:
            raise ConfigError("strategy", "pp", f"a model whose forward calls {self.plan.layers}; it ended before")
        return Handover(left, self._others), answer

    def _wanted_of(self, request: TeacherRequest) -> Wanted:
        if request not in self._wanted:
            outputs, inputs = (
                [name for name in names if self.plan.stage_of(name) == self.number]
                for names in (request.outputs, request.inputs)
            )
            self._wanted[request] = Wanted(self.model, request, outputs, inputs, self.is_last)
        return self._wanted[request]

    def _check_no_leak(self, received: Handover | None, left: torch.Tensor | None, answer: TeacherOutput) -> None:
        """Modules and layers without weights give nan. Where it comes out again, their output was used."""
        if received is None or bool(received.hidden.isnan().any()):
            return
        given: list[torch.Tensor] = [] if left is None else [left]
        answer.map(lambda tensor: given.append(tensor) or tensor)  # type: ignore[func-returns-value]
        if any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in given):
            raise self._refused("what layers or modules of another stage give is used beside the hidden state")

    # ---- in place of modules that are elsewhere ------------------------------------------

    def _pass_over(self, *args: Any, **kwargs: Any) -> Any:
        """A layer of an earlier stage. What it gives is nan, so that any use of it but as a hidden state shows."""
        assert self._received is not None
        if self._entered:
            raise self._refused("a layer of another stage runs behind this stage's layers")
        return self._as_layer_output(torch.full_like(self._received.hidden, float("nan")))

    def _refused(self, reason: str) -> ConfigError:
        expected = f"1 for {type(self.model).__name__}, or strategy 'sharded': {reason}"
        return ConfigError("num_devices", len(self.plan.stages), expected)

    def _as_layer_output(self, hidden: Any) -> Any:
        """What else a layer returns is nan, too: where it enters a layer or an answer, it is not just passed over."""
        others = self._received.others if self._received is not None else None
        if others is None:
            return hidden
        nan = torch.full((), float("nan"), device=hidden.device)
        return (hidden, *(None if other is None else nan.to(other[1]).expand(other[0]) for other in others))

    def _stop(self, *args: Any, **kwargs: Any) -> Any:
        """The first layer of the next stage."""
        self._left = first_tensor(args, kwargs)
        raise ForwardTruncated

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The hidden state of the stage before takes the place of what came out of modules without weights."""
        assert self._received is not None
        if self._entered:
            raise self._refused(f"{type(module).__name__} is called more than once in a forward")
        self._entered = True
        hidden = self._received.hidden
        places: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
        place = next(key for key, value in places if isinstance(value, torch.Tensor))
        if not self._verified:
            self._check_others(module, place, dict(places))
        if isinstance(place, int):
            return (*args[:place], hidden, *args[place + 1 :]), kwargs
        return args, {**kwargs, place: hidden}

    def _check_others(self, layer: nn.Module, place: Any, arguments: Mapping[Any, Any]) -> None:
        """Modules without weights give nan. Where one reaches a layer, more than a hidden state is passed along."""
        spoiled: list[Any] = []
        for key, value in arguments.items():
            if key == place:
                continue

            def look(tensor: torch.Tensor, key: Any = key) -> None:
                if tensor.is_floating_point() and bool(tensor.isnan().any()):
                    spoiled.append(key)

            map_tensors(look, value)
        if spoiled:
            raise self._refused(
                f"{type(layer).__name__} takes `{spoiled[0]}` from a module of the first stage, so more than one "
                "hidden state would have to be passed along"
            )

    def _note_form(self, module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, tuple):
            self._others = None
            return
        tensors = [entry if isinstance(entry, torch.Tensor) else None for entry in output[1:]]
        if not self.is_last and any(t is not None and not t.is_floating_point() for t in tensors):
            raise self._refused(
                f"{type(module).__name__} returns a tensor of whole numbers besides the hidden state, which has no nan "
                "to show whether it is used"
            )
        self._others = tuple(None if t is None else (tuple(t.shape), t.dtype) for t in tensors)

    def _replace_by_shapes(self, name: str) -> None:
        """Modules of the first stage: what they give has the right shape, and is nan, so that any use of it shows."""
        module = self.model.get_submodule(name)
        if not any(True for _ in module.parameters()):
            return  # it needs no weights: let it run
        device = next((p.device for p in self.model.parameters() if p.device.type != "meta"), torch.device("cpu"))
        module.to("meta")
        original = type(module).forward

        def shapes_only(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._entered:
                raise self._refused(f"{name} is used behind the layers too, by the last stage")
            on_meta = _to_meta(args), _to_meta(kwargs)
            given = original(module, *on_meta[0], **on_meta[1])
            return map_tensors(lambda tensor: _nothing_like(tensor, device), given)

        module.forward = types.MethodType(shapes_only, module)

    def _refuse_early(self, name: str) -> None:
        """Modules of the last stage, if they have weights, must not be called here."""
        module = self.model.get_submodule(name)
        if not any(True for _ in module.parameters()):
            return

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise self._refused(f"{name} runs before the layers")

        module.forward = refuse


def _to_meta(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor.to("meta"), value)


def _nothing_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype, device=device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
