"""Answers from a cache: those of the teacher, whatever batch a sample comes in."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from silverspoon_ray.errors import CacheError
from silverspoon_ray.teacher.cache.entries import Cutter, Samples, joined
from silverspoon_ray.teacher.content import sample_keys
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest
from tests.distillers.kinds import KINDS, Padding
from tests.teacher.cache_kinds import answer, cached, close, names_of, real, same_bits, teacher_batch, tensors_of

CASES = ["llama", "gpt2", "bert_mlm", "t5", "vit", "perceptron"]
TOKENS = ["llama", "gpt2", "t5"]
REQUESTS: dict[str, dict[str, Any]] = {
    "full": {},
    "hidden": {"logits": "hidden"},
    "top_k": {"logits": "top_k", "top_k": 4, "temperature": 2.0},
    "top_k half": {"logits": "top_k", "top_k": 4, "wire_dtype": torch.bfloat16},
    "sampled": {"logits": "sampled", "top_k": 6, "seed": 3},
    "features": {"logits": None},
    "features bf16": {"logits": None, "wire_dtype": torch.bfloat16},
    "features fp16": {"logits": None, "wire_dtype": torch.float16},
}
PADDINGS = {"tight": Padding(), "longer": Padding("right", 5, 3), "left": Padding("left", 2, 7)}


def request_of(name: str, kind: str) -> TeacherRequest:
    settings = dict(REQUESTS[name])
    if settings.get("logits", "full") is None:
        modules = names_of(kind, KINDS[kind].model(5, 2))
        settings |= {"outputs": modules, "inputs": modules[:1]}
    return TeacherRequest(**settings)


def has_head(kind: str) -> bool:
    return kind in TOKENS or kind == "bert_mlm"


@pytest.mark.parametrize("form", REQUESTS)
@pytest.mark.parametrize("kind", CASES)
def test_other_batches(kind: str, form: str, tmp_path: Path) -> None:
    """Cold: the teacher's own answer at every real position. Warm: that, in other batches, and nobody is asked."""
    if form == "hidden" and not has_head(kind):
        pytest.skip("no output head")
    request, samples = request_of(form, kind), KINDS[kind].data(12, 3)
    teacher, inner = cached(tmp_path, kind)
    first = {}
    for start in (0, 4, 8):
        batch = teacher_batch(kind, samples[start : start + 4])
        got = answer(teacher, request, batch)
        stream = teacher.open(request)
        expected = stream.on_wire(inner.local.answer(batch, request))
        same_bits(got, real(expected, batch))
        first[start] = got
    assert inner.rows == [4, 4, 4]
    teacher.flush()
    inner.broken = True
    again, never = cached(tmp_path, kind)
    never.broken = True
    for start in (8, 0, 4):
        same_bits(answer(again, request, teacher_batch(kind, samples[start : start + 4])), first[start])
    generator = random.Random(0)
    for name, padding in PADDINGS.items():
        if name == "left" and kind == "t5":
            continue  # without position ids, where a sample begins belongs to its content
        order = generator.sample(range(12), 7)
        batch = teacher_batch(kind, [samples[i] for i in order], padding)
        got, now = answer(again, request, batch), answer(teacher, request, batch)
        same_bits(got, now)
        if form in ("full", "hidden", "features"):  # rounding, and what is chosen by it, may differ between batches
            close(got, real(inner.local.answer(batch, request), batch))
        for row, i in enumerate(order):
            alone = teacher_batch(kind, [samples[i]])
            same_rows(got, batch, row, answer(again, request, alone), alone)


def same_rows(whole: TeacherOutput, batch: dict[str, Any], row: int, alone: TeacherOutput, own: dict[str, Any]) -> None:
    """A row of a batch has the bits of the sample alone, at its real positions."""
    for one, other in zip(tensors_of(whole), tensors_of(alone), strict=True):
        if one[row].shape == other[0].shape and torch.equal(one[row], other[0]):
            continue
        fitting = [
            (one[row][batch[name][row] != 0], other[0][own[name][0] != 0])
            for name in batch
            if "mask" in name and (one.shape[1], other.shape[1]) == (batch[name].shape[1], own[name].shape[1])
        ]
        assert any(torch.equal(left, right) for left, right in fitting), (one.shape, other.shape)


@pytest.mark.parametrize("kind", CASES)
def test_partly_filled(kind: str, tmp_path: Path) -> None:
    """Only what is missing is asked for, and kept for the next."""
    samples = KINDS[kind].data(8, 3)
    teacher, inner = cached(tmp_path, kind)
    answer(teacher, TeacherRequest(), teacher_batch(kind, samples[:3]))
    pending = teacher.open(TeacherRequest()).submit(teacher_batch(kind, samples[:8]))
    pending.result()
    assert (pending.hits, pending.asked, pending.nbytes) == (3, True, 1000)
    assert inner.rows == [3, 5]
    pending = teacher.open(TeacherRequest()).submit(teacher_batch(kind, samples[::-1]))
    assert pending.ready()
    batch = teacher_batch(kind, samples[::-1])
    close(pending.result(), real(inner.local.answer(batch, TeacherRequest()), batch))
    assert (pending.hits, pending.asked, pending.nbytes) == (8, False, 0)
    assert inner.rows == [3, 5]


def test_a_sample_that_comes_twice(tmp_path: Path) -> None:
    """In one batch, and in two that are asked before the first is answered: one entry, which all students see."""
    samples = KINDS["llama"].data(2, 3)
    teacher, _ = cached(tmp_path, "llama")
    stream = teacher.open(TeacherRequest())
    pending = [stream.submit(teacher_batch("llama", [samples[0], samples[1], samples[0]])) for _ in range(2)]
    outputs = [answer.result() for answer in pending]
    assert torch.equal(outputs[0].logits[0], outputs[0].logits[2])
    same_bits(outputs[0], outputs[1])
    assert teacher.store is not None
    assert len(teacher.store) == 2


def test_positions_of_gpt2_belong_to_the_content(tmp_path: Path) -> None:
    """It counts positions from the left edge: beside padding there, and without position ids, it answers otherwise."""
    sample = KINDS["gpt2"].data(1, 3)
    teacher, inner = cached(tmp_path, "gpt2")
    batches = [teacher_batch("gpt2", sample, Padding(side, extra)) for side, extra in [("right", 3), ("left", 3)]]
    assert batches[1].pop("position_ids") is not None
    for batch in batches:
        got = answer(teacher, TeacherRequest(), batch)
        same_bits(got, real(inner.local.answer(batch, TeacherRequest()), batch))
    assert inner.rows == [1, 1]
    answer(teacher, TeacherRequest(), teacher_batch("gpt2", sample, Padding("right", 7)))
    assert inner.rows == [1, 1]


def test_keys() -> None:
    ids = torch.tensor([[5, 6, 7, 0, 0]])
    plain = sample_keys({"input_ids": ids[:, :3]}, 1)
    right = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    left = {"input_ids": ids.roll(2, 1), "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    hole = {"input_ids": torch.tensor([[5, 6, 0, 7]]), "attention_mask": torch.tensor([[1, 1, 0, 1]])}
    assert sample_keys(right, 1) == plain
    assert len({key for batch in (right, left, hole) for key in sample_keys(batch, 1)}) == 3
    positions = {"position_ids": torch.tensor([[0, 0, 0, 1, 2]])}
    assert sample_keys({**left, **positions}, 1) == plain


def test_what_all_rows_share_is_content(tmp_path: Path) -> None:
    batch = {"input_ids": torch.arange(6).view(2, 3)}
    keys = [
        Samples({**batch, **more}).keys
        for more in ({}, {"use_cache": False}, {"scale": 2.0}, {"scale": 3.0}, {"table": torch.ones(5)})
    ]
    assert keys[0] == keys[1]
    assert len({key[0] for key in keys[1:]}) == 4
    with pytest.raises(CacheError, match="scale is a object"):
        Samples({**batch, "scale": object()})


# ---- shapes that can be read in two ways ---------------------------------------------------------------------


def cut(output: TeacherOutput, lengths: list[int], width: int, cutter: Cutter | None = None) -> Any:
    mask = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    batch = {"input_ids": torch.arange(mask.numel()).view(mask.shape), "attention_mask": mask}
    samples = Samples(batch)
    return samples, (cutter or Cutter()).cut(output, samples, range(len(lengths)))


@pytest.mark.parametrize(
    ("shape", "is_cut", "bound"),
    [
        ((2, 4, 8), True, False),
        ((2, 4, 4), True, False),  # as wide as long
        ((2, 4, 3, 8), True, False),
        ((2, 8), False, False),
        ((2, 4), False, True),
        ((2, 6, 8), False, True),
        ((2, 4, 4, 4), False, True),  # attention of as many heads as tokens
        ((2, 3, 4, 4), False, True),
        ((2,), False, False),
    ],
)
def test_shapes(shape: tuple[int, ...], is_cut: bool, bound: bool) -> None:
    tensor = torch.randn(shape)
    samples, entries = cut(TeacherOutput(outputs={"a": tensor}), [2, 4], 4)
    assert [is_bound for _, is_bound in entries] == [bound] * 2
    assert (len(entries[0][0].data) < len(entries[1][0].data)) is is_cut
    back = joined([entry for entry, _ in entries], samples).outputs["a"]
    if is_cut:
        tensor[0, 2:] = 0
    assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint16, torch.int8, torch.bool],
)
def test_dtypes_and_structures(dtype: torch.dtype) -> None:
    """Any bits, in any nesting."""
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (2, 3, 5 * dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype)
    nested = {"a": (tensor, None, [tensor[:, :, 0].clone(), {"n": 3, "s": "x", "f": 0.5, "b": True}])}
    samples, entries = cut(TeacherOutput(outputs=nested), [3, 3], 3)
    back = joined([entry for entry, _ in entries], samples).outputs["a"]
    assert isinstance(back, tuple)
    assert torch.equal(back[0].view(torch.uint8), raw)
    assert back[1] is None
    assert back[2][1] == {"n": 3, "s": "x", "f": 0.5, "b": True}
    assert type(back[2][1]["b"]) is bool


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(6, 3), "mlp.gate gives a tensor .* for 2 samples"),
        (torch.ones(()), "mlp.gate gives a tensor"),
        (object(), "a object cannot be kept"),
        ({1: torch.ones(2)}, "a dict cannot be kept"),
    ],
)
def test_what_cannot_be_kept(value: Any, said: str) -> None:
    with pytest.raises(CacheError, match=said) as refused:
        cut(TeacherOutput(outputs={"mlp.gate": value}), [2, 3], 3)
    assert refused.value.key == "teacher_cache"


def test_a_dimension_that_only_looks_like_positions() -> None:
    """Four queries whatever the length: refused where it was taken for positions, and it shows."""
    cutter = Cutter()
    cut(TeacherOutput(outputs={"a": torch.ones(2, 4, 8)}), [2, 4], 4, cutter)
    with pytest.raises(CacheError, match=r"whether outputs\.a has a dimension for positions cannot be told"):
        cut(TeacherOutput(outputs={"a": torch.ones(2, 4, 8)}), [2, 5], 5, cutter)
    cutter = Cutter()
    for width in (5, 4):  # known by then
        _, entries = cut(TeacherOutput(outputs={"a": torch.ones(2, 4, 8)}), [2, width], width, cutter)
        assert all(bound for _, bound in entries)


def test_bound_entries_serve_only_their_layout(tmp_path: Path) -> None:
    """Attention maps show the padding: they are asked for again in a batch of another width, and right in each."""
    samples = KINDS["bert_mlm"].data(3, 3)
    model = KINDS["bert_mlm"].model(5, 2)
    model.set_attn_implementation("eager")
    request = TeacherRequest(logits=None, outputs=("bert.encoder.layer.0.attention.self",))
    teacher, inner = cached(tmp_path, "bert_mlm", model=model)
    for extra in (0, 4, 0, 4):
        batch = teacher_batch("bert_mlm", samples, Padding("right", extra))
        got = answer(teacher, request, batch).outputs[request.outputs[0]]
        expected = inner.local.answer(batch, request).outputs[request.outputs[0]]
        assert len(got) == len(expected) == 2
        assert torch.equal(got[1], expected[1])
        assert got[1].dim() == 4
    assert inner.rows == [3, 3]


def test_padding_that_counts(tmp_path: Path) -> None:
    """With ``distill_mask="none"`` it is a part of the sample, and so of the answer."""
    samples = KINDS["llama"].data(4, 3)
    teacher, inner = cached(tmp_path, "llama", whole=True)
    for padding, asked in ((Padding(), 4), (Padding("right", 3), 4), (Padding(), 0)):
        batch = teacher_batch("llama", samples, padding)
        before = sum(inner.rows)
        same_bits(answer(teacher, TeacherRequest(), batch), inner.local.answer(batch, TeacherRequest()))
        assert sum(inner.rows) - before == asked
    other, _ = cached(tmp_path, "llama")
    with pytest.raises(CacheError, match="padding 'left out'"):
        other.open(TeacherRequest())
