"""Answers as bytes and back, without a copy where memory allows it.

A tensor pickled as such moves through Ray's object store at a fraction of the speed of a NumPy array, whose memory
goes out of band. So every tensor travels as a one-dimensional view of its bytes, with dtype and shape beside it: any
dtype, bit-exact, two bytes for a bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.protocol import TeacherOutput


@dataclass(frozen=True)
class TensorSpec:
    """Stands for a tensor in an encoded value.

    Attributes:
        index: which buffer holds its bytes.
        dtype: name of the torch dtype, without the ``torch.``.
        shape: its shape.
    """

    index: int
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Encoded:
    """A value whose tensors were taken out.

    Attributes:
        value: the value with a :class:`TensorSpec` in place of every tensor.
        buffers: the tensors' bytes, ``uint8``, one-dimensional: NumPy arrays in host memory for the object store,
            tensors where they go another way.
    """

    value: Any
    buffers: list[np.ndarray[Any, Any] | torch.Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


def encode(value: Any, wire_dtype: torch.dtype | None = None) -> Encoded:
    """Take the tensors out of nested tuples, lists and mappings.

    Args:
        value: the value; tensors on any device, contiguous or not.
        wire_dtype: floating-point tensors are cast to it first; None: bit-exact.
    """
    encoded = Encoded(None)
    encoded.value = _take_out(value, encoded, {}, wire_dtype)
    return _as_arrays(encoded)


def _take_out(value: Any, encoded: Encoded, known: dict[tuple[Any, ...], int], wire_dtype: torch.dtype | None) -> Any:
    """The value without its tensors, whose bytes are added to ``encoded`` unless they are ``known``."""

    def take(tensor: torch.Tensor) -> TensorSpec:
        # What one module returns is often what the next one gets. The same memory is sent once.
        place: tuple[Any, ...] = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
        if wire_dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(wire_dtype)
        place = (*place, tensor.dtype)
        if place not in known or tensor.numel() == 0:
            encoded.buffers.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            known[place] = len(encoded.buffers) - 1
        return TensorSpec(known[place], str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    return map_tensors(take, value)


def decode(encoded: Encoded) -> Any:
    """Put the tensors back, as views of the buffers.

    The views of a buffer that came out of the object store share their memory with every other reader on the node.
    They must only be read; whoever hands them to code that may write, clones them first.
    """

    return _put_back(encoded.value, encoded.buffers)


def encode_output(output: TeacherOutput, wire_dtype: torch.dtype | None = None, arrays: bool = True) -> Encoded:
    """An answer; soft targets travel in the dtypes that they have.

    Args:
        output: the answer.
        wire_dtype: floating-point tensors are cast to it first; None: bit-exact.
        arrays: make arrays in host memory of the buffers; otherwise they are tensors on their devices, in the
            answer's own memory where that allows it.
    """
    encoded, known = Encoded(None), dict[tuple[Any, ...], int]()
    cast = {"logits": output.logits, "outputs": output.outputs, "inputs": output.inputs}
    encoded.value = _take_out(cast, encoded, known, wire_dtype)
    encoded.value["soft_targets"] = _take_out(output.soft_targets, encoded, known, None)
    return _as_arrays(encoded) if arrays else encoded


def _as_arrays(encoded: Encoded) -> Encoded:
    encoded.buffers = [b.to("cpu").numpy() if isinstance(b, torch.Tensor) else b for b in encoded.buffers]
    return encoded


def decode_output(encoded: Encoded) -> TeacherOutput:
    """The answer, borrowed: see :func:`decode`."""
    return TeacherOutput(**decode(encoded), borrowed=True)


def decode_received(encoded: Encoded) -> TeacherOutput:
    """An answer whose buffers are this process's own; borrowed only where one buffer serves several tensors."""
    indices = list(_indices(encoded.value))
    return TeacherOutput(**decode(encoded), borrowed=len(indices) > len(set(indices)))


def _indices(value: Any) -> Iterator[int]:
    if isinstance(value, TensorSpec):
        yield value.index
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _indices(item)


# Not a closure within decode: one that calls itself is a reference cycle, and would keep the buffers, memory of the
# object store, until the garbage collector comes by.
def _put_back(value: Any, buffers: list[np.ndarray[Any, Any] | torch.Tensor]) -> Any:
    if isinstance(value, TensorSpec):
        return _view(buffers[value.index], getattr(torch, value.dtype), value.shape)
    if isinstance(value, dict):
        return {key: _put_back(item, buffers) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_put_back(item, buffers) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _view(buffer: np.ndarray[Any, Any] | torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if isinstance(buffer, torch.Tensor):
        return buffer.view(dtype).view(shape)
    if buffer.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    # torch warns about every read-only NumPy array that it wraps, and a warning filter would be global state. A
    # ctypes array over the same address does not say that it is read-only; it keeps the real owner alive.
    raw = (ctypes.c_byte * buffer.nbytes).from_address(buffer.ctypes.data)
    raw._owner = buffer  # type: ignore[attr-defined]
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)
