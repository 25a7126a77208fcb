"""Seeing what modules receive and return during a forward, and stopping the forward once it has been seen."""

from __future__ import annotations

import copy
import difflib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.nested import map_tensors

OutputCallback = Callable[[int, tuple[Any, ...], Any], None]


class ForwardTruncated(Exception):  # noqa: N818  (it is a signal, nothing has gone wrong)
    """Ends a forward whose remaining part nobody needs; see :meth:`ModuleCaptureEngine.forward`."""


class ModuleCaptureEngine:
    """Hooks on modules of a model that keep their arguments and outputs.

    Captures happen while the model's own forward runs and at no other time: modules that run again in the backward
    pass, because of gradient checkpointing, are not captured a second time. A module that runs more than once in a
    forward keeps its last values. What was captured stays until it is popped, cleared, or the next forward begins.

    Use it as a context manager, or call :meth:`register` and :meth:`deregister`.

    Args:
        model: the model whose forward is watched.
        modules_to_capture: its submodules; a module's index in this list is its id below.
        deepcopy_captured_args_and_kwargs: keep copies, of outputs too, for models that write to them in place.
        output_callback: ``callback(module_id, args, output)``, called as a module fires, with the arguments and the
            output as they are (not detached).
        detach_outputs: keep outputs without their graph.
        capture_inputs: keep arguments: of all modules, of none, or of the modules with these ids.
        auto_truncate: stop the forward when every module has fired. The model's call then raises
            :class:`ForwardTruncated`; :meth:`forward` catches it.
        capture_outputs: as ``capture_inputs``, for outputs.
        truncate_after: stop after so many captures instead (an argument capture and an output capture count one each);
            for models in which modules fire more than once.
    """

    def __init__(
        self,
        model: nn.Module,
        modules_to_capture: Sequence[nn.Module],
        deepcopy_captured_args_and_kwargs: bool = False,
        output_callback: OutputCallback | None = None,
        detach_outputs: bool = True,
        capture_inputs: bool | Collection[int] = True,
        auto_truncate: bool = False,
        capture_outputs: bool | Collection[int] = True,
        truncate_after: int | None = None,
    ) -> None:
        self.model = model
        self.modules_to_capture = list(modules_to_capture)
        inside = set(model.modules())
        for module in self.modules_to_capture:
            if not isinstance(module, nn.Module) or module not in inside:
                raise ConfigError("modules_to_capture", type(module).__name__, "modules of the model itself")
        self.deepcopy_captured_args_and_kwargs = deepcopy_captured_args_and_kwargs
        self.output_callback = output_callback
        self.detach_outputs = detach_outputs
        self.inputs_of = self._ids(capture_inputs)
        self.outputs_of = self._ids(capture_outputs)
        self.auto_truncate = auto_truncate
        self.truncate_after = truncate_after
        self.captured_inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.captured_outputs: dict[int, Any] = {}
        self.events = 0
        """Captures in the current forward, or the last one."""
        self._versions: list[tuple[int, weakref.ref[torch.Tensor], int]] = []
        self._awaited: set[tuple[str, int]] = set()
        self._depth = 0
        self._handles: list[RemovableHandle] = []

    def _ids(self, which: bool | Collection[int]) -> frozenset[int]:
        everything = range(len(self.modules_to_capture))
        return frozenset(everything if which is True else () if which is False else which)

    # ---- hooks ---------------------------------------------------------------------------

    @property
    def is_registered(self) -> bool:
        return bool(self._handles)

    def register(self) -> None:
        """Put the hooks in place; without effect if they are."""
        if self._handles:
            return
        try:
            self._handles.append(self.model.register_forward_pre_hook(self._begin, prepend=True))
            for module_id, module in enumerate(self.modules_to_capture):
                if module_id in self.inputs_of:
                    self._handles.append(
                        module.register_forward_pre_hook(_Bound(self._on_input, module_id), with_kwargs=True)
                    )
                if module_id in self.outputs_of:
                    self._handles.append(module.register_forward_hook(_Bound(self._on_output, module_id)))
            self._handles.append(self.model.register_forward_hook(self._end, always_call=True))
        except BaseException:
            self.deregister()
            raise

    def deregister(self) -> None:
        """Take the hooks away. What has been captured stays."""
        while self._handles:
            self._handles.pop().remove()
        self._depth = 0

    def __enter__(self) -> ModuleCaptureEngine:
        self.register()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.deregister()

    # ---- results -------------------------------------------------------------------------

    def get_captured(self, module_id: int) -> tuple[Any, Any, Any]:
        """``(args, kwargs, output)`` of a module. Raises KeyError if it has not been captured."""
        args, kwargs = self.captured_inputs[module_id] if module_id in self.inputs_of else (None, None)
        return args, kwargs, self.captured_outputs[module_id] if module_id in self.outputs_of else None

    def pop_captured_inputs(self, module_id: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` of a module, which the engine then forgets. Raises KeyError if there are none."""
        return self.captured_inputs.pop(module_id)

    def pop_captured_output(self, module_id: int) -> Any:
        """A module's output, which the engine then forgets. Raises KeyError if there is none."""
        return self.captured_outputs.pop(module_id)

    def clear_captured(self) -> None:
        """Forget everything."""
        self.captured_inputs.clear()
        self.captured_outputs.clear()
        self._versions.clear()

    def written_to(self) -> list[int]:
        """Modules whose captured output, or first tensor of whose arguments, the model has written to since."""
        live = [(number, tensor(), version) for number, tensor, version in self._versions]
        return sorted({n for n, tensor, version in live if tensor is not None and version_of(tensor) != version})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; what it returned, or None where the forward was stopped early."""
        try:
            return self.model(*args, **kwargs)
        except ForwardTruncated:
            return None

    # ---- as modules fire -----------------------------------------------------------------

    def begin(self) -> None:
        """A forward of the model begins; called by a hook, or by who registers the engine within that forward."""
        self._depth += 1
        if self._depth == 1:
            self.clear_captured()
            self.events = 0
            self._awaited = {("input", i) for i in self.inputs_of} | {("output", i) for i in self.outputs_of}

    def _begin(self, model: nn.Module, args: Any) -> None:
        self.begin()

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)

    def _on_input(self, module_id: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._depth == 0:
            return
        if self.deepcopy_captured_args_and_kwargs:
            args, kwargs = _copied(args), _copied(kwargs)
        self.captured_inputs[module_id] = (args, kwargs)
        self._remember(module_id, first_tensor(args, kwargs))
        self._count("input", module_id)

    def _on_output(self, module_id: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._depth == 0:
            return
        kept = map_tensors(torch.Tensor.detach, output) if self.detach_outputs else output
        if self.deepcopy_captured_args_and_kwargs:
            kept = map_tensors(torch.clone, kept)
        self.captured_outputs[module_id] = kept
        self._remember(module_id, kept)
        if self.output_callback is not None:
            self.output_callback(module_id, args, output)
        self._count("output", module_id)

    def _remember(self, module_id: int, value: Any) -> None:
        map_tensors(lambda tensor: self._versions.append((module_id, weakref.ref(tensor), version_of(tensor))), value)

    def _count(self, kind: str, module_id: int) -> None:
        self.events += 1
        self._awaited.discard((kind, module_id))
        seen = self.events >= self.truncate_after if self.truncate_after is not None else not self._awaited
        if seen and (self.auto_truncate or self.truncate_after is not None):
            raise ForwardTruncated


class _Bound:
    """A hook that knows its module's id. Not a closure, so that a hooked model can still be copied."""

    def __init__(self, function: Callable[..., None], module_id: int) -> None:
        self.function = function
        self.module_id = module_id

    def __call__(self, *arguments: Any) -> None:
        self.function(self.module_id, *arguments)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to."""
    return 0 if tensor.is_inference() else tensor._version


def _copied(value: Any) -> Any:
    """Tensors cloned, containers made anew; of anything else (a cache, say) a deep copy."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_copied(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return copy.deepcopy(value)


def named_module(model: nn.Module, name: str, key: str = "outputs") -> nn.Module:
    """The submodule of that dotted name.

    Raises:
        ConfigError: there is none; the nearest names are listed.
    """
    modules = dict(model.named_modules())
    if name not in modules:
        near = difflib.get_close_matches(name, [known for known in modules if known], n=5, cutoff=0.3)
        raise ConfigError(key, name, f"no module of that name; near are {', '.join(near) or 'none'}")
    return modules[name]


@contextmanager
def capturing(
    model: nn.Module,
    outputs: Sequence[str] = (),
    inputs: Sequence[str] = (),
    copies: bool = False,
    truncate_after: int | None = None,
) -> Iterator[NamedCaptures]:
    """Hooks on the named modules while the context lasts; none is left behind, also after an exception.

    Args:
        model: the model; call it through the yielded :meth:`NamedCaptures.forward`, or as always.
        outputs, inputs: dotted names of the modules of which these are wanted.
        copies: keep copies, for models that write in place.
        truncate_after: see :class:`ModuleCaptureEngine`.

    Raises:
        ConfigError: a name matches no module.
    """
    names = list(dict.fromkeys([*outputs, *inputs]))
    modules = [named_module(model, name, "outputs" if name in outputs else "inputs") for name in names]
    engine = ModuleCaptureEngine(
        model,
        modules,
        deepcopy_captured_args_and_kwargs=copies,
        detach_outputs=False,
        capture_inputs=[index for index, name in enumerate(names) if name in set(inputs)],
        capture_outputs=[index for index, name in enumerate(names) if name in set(outputs)],
        truncate_after=truncate_after,
    )
    with engine:
        yield NamedCaptures(engine, names)


class NamedCaptures:
    """What an engine has captured, by module name."""

    def __init__(self, engine: ModuleCaptureEngine, names: list[str]) -> None:
        self.engine = engine
        self.names = names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`ModuleCaptureEngine.forward`."""
        return self.engine.forward(*args, **kwargs)

    @property
    def outputs(self) -> dict[str, Any]:
        """By name, what a module returned."""
        return {self.names[module_id]: output for module_id, output in self.engine.captured_outputs.items()}

    @property
    def written_to(self) -> list[str]:
        """See :meth:`ModuleCaptureEngine.written_to`."""
        return [self.names[module_id] for module_id in self.engine.written_to()]

    @property
    def inputs(self) -> dict[str, Any]:
        """By name, the first tensor that a module was called with: positional arguments first, then keywords."""
        captured = self.engine.captured_inputs.items()
        return {self.names[module_id]: first_tensor(args, kwargs) for module_id, (args, kwargs) in captured}


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The first tensor among a call's arguments; None if there is none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
