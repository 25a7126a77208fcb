"""torch.compile for a teacher: the forwards of its layers, while nobody has to look into them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.stages import plan_pipeline

logger = logging.getLogger(__name__)

Backend = str | Callable[..., Any]

# Grows with shapes that torch does not make dynamic: a batch or length of 1, the first length seen.
GRAPHS_PER_LAYER = 8
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


class CompiledLayers:
    """Compiled forwards of the layers of a model's heaviest stack, put in place while :meth:`active` lasts.

    A layer is compiled for itself, so that hooks on it run as ever, around the compiled code. Hooks on modules inside
    compiled code may silently not fire, so a layer that contains one of those runs as it is for that forward.

    Nothing is compiled at construction: a layer's first forward does it, and takes as long as that takes.

    Args:
        model: the teacher, or a stage of it.
        backend, mode: as for ``torch.compile``.
        layers: dotted names of the layers; None: those of the heaviest ``ModuleList`` or ``Sequential`` (where there
            is none, a line of the log says that nothing is compiled).
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend = "inductor",
        mode: str | None = None,
        layers: Sequence[str] | None = None,
    ) -> None:
        self.backend = backend
        self.mode = mode
        self.calls = 0
        """Forwards of layers by compiled code."""
        if layers is None:
            layers = stacked_layers(model)
        self.layers = {name: model.get_submodule(name) for name in layers}
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._told: set[str] = set()

    @contextmanager
    def active(self, names: Collection[str] = ()) -> Iterator[None]:
        """While it lasts, layers run compiled; afterwards, also after an error, every forward is what it was.

        Enter it behind the hooks that are to fire.

        Args:
            names: dotted names of modules into which somebody looks.
        """
        changed: list[tuple[nn.Module, Any]] = []
        try:
            for name, layer in self.layers.items():
                if any(other.startswith(f"{name}.") for other in names) or self._is_hooked_inside(name, layer):
                    continue
                if name not in self._compiled:
                    self._compiled[name] = self._counted(self._compile(layer.forward))
                changed.append((layer, vars(layer).get("forward")))
                layer.forward = self._compiled[name]
            yield
        finally:
            for layer, before in changed:
                if before is None:
                    del layer.forward
                else:
                    layer.forward = before

    def _compile(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        # Layers share their class's code, and what is compiled of it, if nothing tells them apart. Where something does
        # (with a cache, a layer's number) each has code of its own, and torch's limit of 8 would leave the later ones
        # uncompiled.
        limit = max(torch._dynamo.config.recompile_limit, GRAPHS_PER_LAYER * len(self.layers))
        compiled: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]  # its overloads lack the limit
            forward, backend=self.backend, mode=self.mode, recompile_limit=limit
        )
        return compiled

    def _counted(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            output = compiled(*args, **kwargs)
            # A CUDA graph writes its next output over this one, which the student or another layer still reads.
            return map_tensors(torch.clone, output) if self.mode in CUDA_GRAPH_MODES else output

        return forward

    def _is_hooked_inside(self, name: str, layer: nn.Module) -> bool:
        """Somebody else's hooks, a quantizer's say: torch may not see those that came after it compiled."""
        for inner, module in layer.named_modules():
            if inner and (module._forward_hooks or module._forward_pre_hooks):
                if name not in self._told:
                    logger.info("layer %s runs uncompiled where hooks are inside it (on %s)", name, inner)
                    self._told.add(name)
                return True
        return False


def running(compiled: CompiledLayers | None, names: Collection[str]) -> AbstractContextManager[None]:
    """See :meth:`CompiledLayers.active`; without any nothing changes."""
    return nullcontext() if compiled is None else compiled.active(names)


def stacked_layers(model: nn.Module) -> tuple[str, ...]:
    """Dotted names of the layers that a pipeline would be cut between; none where a model has no stack of them."""
    try:
        return plan_pipeline(model, 1).layers
    except ConfigError as error:
        logger.warning("torch_compile leaves %s as it is: %s", type(model).__name__, error.expected)
        return ()


def compiled_graphs() -> int:
    """How many graphs torch has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compile_settings(args: Any) -> dict[str, Any] | None:
    """What training arguments say of torch.compile: ``backend`` and ``mode``; None where it is not wanted."""
    if not args.torch_compile:
        return None
    return {"backend": args.torch_compile_backend or "inductor", "mode": args.torch_compile_mode}


def check_compile_settings(settings: Mapping[str, Any]) -> None:
    """Refuse what torch.compile would refuse at the first batch.

    Raises:
        ConfigError: an unknown keyword, backend or mode.
    """
    for key in settings:
        if key not in ("backend", "mode"):
            raise ConfigError(f"torch_compile.{key}", settings[key], "unknown; known are backend, mode")
    backend, mode = settings.get("backend", "inductor"), settings.get("mode")
    backends = [name for name in torch.compiler.list_backends(()) if "TESTING" not in name]
    if not callable(backend) and backend not in backends:
        raise ConfigError("torch_compile.backend", backend, f"one of {', '.join(backends)}")
    if mode is not None and mode not in torch._inductor.list_mode_options():
        raise ConfigError(
            "torch_compile.mode", mode, f"None or one of {', '.join(torch._inductor.list_mode_options())}"
        )
