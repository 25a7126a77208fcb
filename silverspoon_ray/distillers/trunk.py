"""The arguments that a student's blocks are called with, from the student's own forward.

For blockwise distillation a block's hidden states come from the teacher, but masks, position embeddings and whatever
else a block takes must fit the student: its heads, their size, its way of encoding positions. They are what the
student itself would hand to the block. To get them, its forward runs with the blocks passed over, so that it costs
little more than an embedding look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from silverspoon_ray.capture import ForwardTruncated
from silverspoon_ray.errors import AlignmentError
from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.local import evaluating


@dataclass(frozen=True)
class BlockCall:
    """How the student would call one of its blocks.

    Attributes:
        args, kwargs: the arguments.
        place: where the hidden states are among them: a position or a keyword; None: the block takes none (an embedding
            of token ids, say).
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | str | None

    @property
    def hidden(self) -> torch.Tensor | None:
        """The student's own hidden states; of a block behind one that is passed over, only their shape means much."""
        if self.place is None:
            return None
        value: torch.Tensor = self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]
        return value

    def with_hidden(self, hidden: torch.Tensor) -> BlockCall:
        """The same call with other hidden states."""
        if isinstance(self.place, int):
            args = (*self.args[: self.place], hidden, *self.args[self.place + 1 :])
            return BlockCall(args, self.kwargs, self.place)
        assert self.place is not None
        return BlockCall(self.args, {**self.kwargs, self.place: hidden}, self.place)


class Trunk:
    """A student without its blocks.

    Args:
        student: the model.
        blocks: those of its modules whose calls are wanted.
    """

    def __init__(self, student: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.student = student
        self.blocks = list(dict.fromkeys(blocks))
        self._keeps_shape: dict[int, bool] = {}  # by block
        self._verified = False
        self._passed: torch.Tensor | None = None
        # What an encoder's blocks give is among the arguments of a decoder's blocks, so they have to run.
        self._passes_over = not getattr(getattr(student, "config", None), "is_encoder_decoder", False)

    @torch.no_grad()
    def calls(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[nn.Module, BlockCall]:
        """Each block's call.

        A block that returns a tensor of its input's shape is passed over. Whether it does shows
        when it runs for the first time. Every other block, and every block of an encoder-decoder model, runs, without
        gradients and in eval mode.

        Args:
            forward: the student's.
            args, kwargs: what it is called with.

        Raises:
            AlignmentError: a block is not called by the student's forward.
        """
        seen: dict[nn.Module, BlockCall] = {}
        with evaluating(self.student), ExitStack() as replaced:
            for block in self.blocks:
                replaced.enter_context(overridden_forward(block, self._recorder(block, seen)))
            with suppress(ForwardTruncated):
                forward(*args, **kwargs)
        missing = [block for block in self.blocks if block not in seen]
        if missing:
            names = {id(module): name for name, module in self.student.named_modules()}
            raise AlignmentError(
                "student_block", names.get(id(missing[0])), "a module that the student's forward calls; it does not"
            )
        if self._passed is not None and not self._verified:
            self._verified = True
            if any(_takes_nan(call) for call in seen.values()):
                # A block takes what an earlier one gave besides its hidden state: then all have to run.
                self._passes_over = False
                self._keeps_shape.clear()
                self._passed = None
                return self.calls(forward, *args, **kwargs)
        self._passed = None
        return seen

    def _nothing_like(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a block that is passed over gives: of the right shape, and nan, so that any use of it shows."""
        passed = self._passed
        if passed is None or passed.shape != hidden.shape or passed.dtype != hidden.dtype:
            self._passed = passed = torch.full_like(hidden, float("nan"))
        return passed

    def _recorder(self, block: nn.Module, seen: dict[nn.Module, BlockCall]) -> Callable[..., Any]:
        def record(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            call = _call(args, kwargs)
            seen[block] = call
            if len(seen) == len(self.blocks):
                raise ForwardTruncated  # nothing behind it is wanted
            if self._keeps_shape.get(id(block)) and call.hidden is not None:
                return self._nothing_like(call.hidden)
            output = original(*args, **kwargs)
            same = isinstance(output, torch.Tensor) and call.hidden is not None and output.shape == call.hidden.shape
            # What a block contains would not be called if the block were passed over.
            contains = any(inner in self.blocks for inner in block.modules() if inner is not block)
            self._keeps_shape[id(block)] = same and not contains and self._passes_over
            return output

        return record


def _takes_nan(call: BlockCall) -> bool:
    """Whether an argument other than the hidden states comes out of a block that was passed over."""
    found: list[bool] = []

    def look(tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            found.append(bool(tensor.isnan().any()))

    others = [value for place, value in (*enumerate(call.args), *call.kwargs.items()) if place != call.place]
    map_tensors(look, others)
    return any(found)


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
    # A cache that a block filled would be handed to it again, already full, when it is trained.
    args = tuple(None if isinstance(value, Cache) else value for value in args)
    kwargs = {key: None if isinstance(value, Cache) else value for key, value in kwargs.items()}
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    place = next((p for p, v in places if isinstance(v, torch.Tensor)), None)
    if place is not None:
        value = args[place] if isinstance(place, int) else kwargs[place]
        if not value.is_floating_point():
            place = None
    return BlockCall(args, kwargs, place)


@contextmanager
def overridden_forward(module: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """While the context lasts, calling ``module`` calls ``run(forward, *args, **kwargs)`` with its own forward.

    Wrappers around the module (DDP, autocast) keep what they do, and hooks fire as always.
    """
    before = module.__dict__.get("forward")
    original = module.forward
    module.forward = lambda *args, **kwargs: run(original, *args, **kwargs)
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
