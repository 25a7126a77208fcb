"""Tensors as bytes and back."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch

from silverspoon_ray.cluster.codec import Encoded, decode, decode_output, encode, encode_output
from silverspoon_ray.teacher.protocol import TeacherOutput

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def over_the_wire(encoded: Encoded) -> Encoded:
    """Through pickle with buffers out of band and read-only, as the object store delivers them."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(encoded, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[memoryview(bytes(buffer.raw())) for buffer in buffers])


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = torch.randint(0, 2, (4, 6)) if dtype is torch.bool else torch.randn(4, 6) * 3
    base = base.to(dtype)
    return {
        "plain": base,
        "0-d": base[0, 0],
        "empty": base[:0],
        "empty rows": base[:, :0],
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": base[:1].expand(5, 6),
        "one": base[:1, :1],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, tensor in tensors(dtype).items():
            back = decode(over_the_wire(encode(tensor)))
            assert back.dtype == tensor.dtype, name
            assert back.shape == tensor.shape, name
            assert bits(back) == bits(tensor), name


def test_special_values_keep_their_bits() -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    assert bits(decode(over_the_wire(encode(special)))) == bits(special)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.float8_e4m3fn, 1)])
def test_an_element_costs_what_its_dtype_takes(dtype: torch.dtype, size: int) -> None:
    assert encode(torch.zeros(3, 5, dtype=dtype)).nbytes == 15 * size


def test_wire_dtype_casts_floats_only() -> None:
    encoded = encode({"x": torch.randn(4), "ids": torch.arange(4)}, wire_dtype=torch.bfloat16)
    back = decode(encoded)
    assert back["x"].dtype is torch.bfloat16
    assert back["ids"].dtype is torch.int64


def test_nested_values_keep_their_shape() -> None:
    value = {"a": (torch.ones(2), [torch.zeros(1), None]), "b": 3, "c": {"d": torch.arange(3)}}
    back = decode(over_the_wire(encode(value)))
    assert isinstance(back["a"], tuple)
    assert back["a"][1][1] is None
    assert back["b"] == 3
    assert torch.equal(back["c"]["d"], torch.arange(3))


def test_decoding_copies_nothing() -> None:
    encoded = over_the_wire(encode(torch.randn(1000)))
    assert decode(encoded).data_ptr() == encoded.buffers[0].ctypes.data


def test_the_buffer_outlives_the_encoded_value() -> None:
    original = torch.randn(100_000)
    back = decode(over_the_wire(encode(original)))
    np.random.default_rng(0).bytes(2_000_000)  # reuse freed memory, if it was freed
    assert torch.equal(back, original)


def test_owned_answers_share_no_memory() -> None:
    encoded = over_the_wire(encode_output(TeacherOutput(logits=torch.ones(4), outputs={"m": (torch.ones(2),)})))
    borrowed = decode_output(encoded)
    assert borrowed.borrowed
    mine = borrowed.owned()
    mine.logits.zero_()
    mine.outputs["m"][0].zero_()
    assert torch.equal(decode_output(encoded).logits, torch.ones(4))
    assert torch.equal(decode_output(encoded).outputs["m"][0], torch.ones(2))
