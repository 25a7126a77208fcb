"""Rows, masks, denominators, chunks, memory and graphs of the divergences: what must not change the loss."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses import JSDLoss, KLDivergenceLoss, jsd_loss, kl_divergence_loss

Loss = KLDivergenceLoss | JSDLoss

KINDS: dict[str, Callable[..., Loss]] = {
    "kl": kl_divergence_loss,
    "reverse": lambda **kw: kl_divergence_loss(reverse=True, **kw),
    "jsd": lambda **kw: jsd_loss(beta=0.3, **kw),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def logits(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def value_and_gradient(
    loss: Loss, student: torch.Tensor, teacher: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = student.detach().clone().requires_grad_()
    value = loss(leaf, teacher, **kwargs)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


# --- Masks and denominators


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e4])
def test_masked_rows_are_as_if_absent(kind: str, dtype: torch.dtype, junk: float) -> None:
    student, teacher = logits(3, 6, 40, seed=1, dtype=dtype), logits(3, 6, 40, seed=2, dtype=dtype)
    mask = torch.rand(3, 6, generator=torch.Generator().manual_seed(3)) > 0.4
    loss = KINDS[kind](temperature=2.0)
    expected, expected_gradient = value_and_gradient(loss, student[mask], teacher[mask])
    student[~mask], teacher[~mask] = junk, -junk
    value, gradient = value_and_gradient(loss, student, teacher, mask=mask)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient[mask], expected_gradient, rtol=1e-6, atol=0)
    assert gradient[~mask].eq(0).all()


@kinds
@pytest.mark.parametrize("num_items", [None, 0, 0.0, torch.tensor(0), 12])
def test_nothing_counts(kind: str, num_items: Any) -> None:
    student, teacher = torch.full((2, 3, 8), math.nan), logits(2, 3, 8, seed=4)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    value, gradient = value_and_gradient(KINDS[kind](), student, teacher, mask=mask, num_items=num_items)
    assert value.item() == 0.0
    assert gradient.eq(0).all()


@kinds
def test_no_rows(kind: str) -> None:
    value, gradient = value_and_gradient(KINDS[kind](), torch.empty(0, 5, 8), torch.empty(0, 5, 8))
    assert value.item() == 0.0
    assert gradient.shape == (0, 5, 8)


@kinds
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_micro_batches_add_up(kind: str, parts: int, as_tensor: bool) -> None:
    student, teacher = logits(8, 5, 30, seed=5), logits(8, 5, 30, seed=6)
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 4, 0, 2, 5, 1]).unsqueeze(1)
    loss = KINDS[kind](temperature=3.0)
    expected, expected_gradient = value_and_gradient(loss, student, teacher, mask=mask)
    count = mask.sum() if as_tensor else int(mask.sum())
    pieces = [
        value_and_gradient(loss, s, t, mask=m, num_items=count)
        for s, t, m in zip(student.chunk(parts), teacher.chunk(parts), mask.chunk(parts), strict=True)
    ]
    torch.testing.assert_close(torch.stack([v for v, _ in pieces]).sum(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.cat([g for _, g in pieces]), expected_gradient, rtol=1e-6, atol=0)


@kinds
@pytest.mark.parametrize(
    "num_items", [7, 0.5, torch.tensor(7), torch.tensor(0.5), torch.tensor(7.0, dtype=torch.float64)]
)
def test_num_items_is_the_denominator(kind: str, num_items: Any) -> None:
    student, teacher = logits(4, 30, seed=7), logits(4, 30, seed=8)
    loss = KINDS[kind]()
    mean, mean_gradient = value_and_gradient(loss, student, teacher)
    value, gradient = value_and_gradient(loss, student, teacher, num_items=num_items)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, mean * 4 / float(num_items), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, mean_gradient * 4 / float(num_items), rtol=1e-6, atol=0)


# --- Chunks, layout, memory


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("classes", [7, 1003, 40001])
@pytest.mark.parametrize("threads", [1, 2])
def test_chunk_size_changes_nothing(kind: str, dtype: torch.dtype, classes: int, threads: int) -> None:
    student, teacher = logits(11, classes, seed=9, dtype=dtype), logits(11, classes, seed=10, dtype=dtype)
    mask = torch.arange(11) != 4
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, gradient = value_and_gradient(KINDS[kind](chunk_size=11), student, teacher, mask=mask)
        for size in (0, 1, 2, 3, 10, 500):
            value, other = value_and_gradient(KINDS[kind](chunk_size=size), student, teacher, mask=mask)
            assert torch.equal(value, whole)
            torch.testing.assert_close(other, gradient, rtol=1e-6, atol=1e-9)
    finally:
        torch.set_num_threads(before)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shifted": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "rows_transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "classes_first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "padded_vocabulary": lambda x: torch.cat([x, x[..., :3]], -1)[..., :-3],
    "every_second": lambda x: torch.stack([x, x], 1).flatten(0, 1)[::2],
}


@kinds
@pytest.mark.parametrize("student_layout", LAYOUTS)
@pytest.mark.parametrize("teacher_layout", [*LAYOUTS, "plain"])
def test_layout_changes_nothing(kind: str, student_layout: str, teacher_layout: str) -> None:
    student, teacher = logits(3, 4, 20, seed=11), logits(3, 4, 20, seed=12)
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(13)) > 0.3
    loss = KINDS[kind](temperature=2.0, chunk_size=3)
    expected, expected_gradient = value_and_gradient(loss, student, teacher, mask=mask)
    leaf = student.clone().requires_grad_()
    view = LAYOUTS[student_layout](leaf)
    other = LAYOUTS.get(teacher_layout, torch.clone)(teacher)
    torch.testing.assert_close(view.detach(), student, rtol=0, atol=0)
    value = loss(view, other, mask=mask)
    value.backward()
    torch.testing.assert_close(value.detach(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(leaf.grad, expected_gradient, rtol=1e-5, atol=1e-7)


@kinds
def test_single_row_without_leading_dimensions(kind: str) -> None:
    student, teacher = logits(20, seed=14), logits(20, seed=15)
    value, gradient = value_and_gradient(KINDS[kind](), student, teacher)
    expected, expected_gradient = value_and_gradient(KINDS[kind](), student[None], teacher[None])
    assert torch.equal(value, expected)
    assert torch.equal(gradient, expected_gradient[0])
    assert KINDS[kind]()(student, teacher, mask=torch.tensor(False)).item() == 0.0


class Recorder(TorchDispatchMode):
    """Notes the operations and keeps every array they make, so that no address is used twice."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in inputs}
        self.made: dict[int, torch.Tensor] = {}
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.add(func.overloadpacket.__name__)
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.made.setdefault(x.untyped_storage().data_ptr(), x)
        return result

    def sizes(self) -> list[int]:
        """Bytes of the arrays made, the largest first."""
        return sorted((x.untyped_storage().nbytes() for x in self.made.values()), reverse=True)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["plain", "shifted"])
@pytest.mark.parametrize("need_gradient", [True, False])
def test_memory_is_one_gradient_and_the_workspace(
    kind: str, dtype: torch.dtype, layout: str, need_gradient: bool
) -> None:
    classes, chunk = 500, 4
    workspace = 4 * chunk * classes * 4
    for batch in (8, 32):
        student, teacher = (logits(batch, 17, classes, seed=s, dtype=dtype) for s in (16, 17))
        student.requires_grad_(need_gradient)
        rows = slice(None, -1) if layout == "shifted" else slice(None)
        used, target = student[:, rows], teacher[:, rows]
        mask = torch.ones(used.shape[:-1], dtype=torch.bool)
        with Recorder(student, teacher, mask) as recorder:
            loss = KINDS[kind](temperature=2.0, chunk_size=chunk)(used, target, mask=mask, num_items=torch.tensor(9))
            if need_gradient:
                torch.autograd.grad(loss, used)
        gradient, *others = recorder.sizes() if need_gradient else [0, *recorder.sizes()]
        assert gradient == (used.numel() * dtype.itemsize if need_gradient else 0)
        assert others[0] == workspace  # the same for both batches
        assert others[1] < workspace
        assert not recorder.operations & {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"}


# --- Graphs


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_second_backward_of_a_retained_graph(kind: str, dtype: torch.dtype) -> None:
    student, teacher = logits(5, 30, seed=18, dtype=dtype).requires_grad_(), logits(5, 30, seed=19)
    loss = KINDS[kind]()(student * 1, teacher) * 0.7
    (first,) = torch.autograd.grad(loss, student, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, student, retain_graph=True)
    (third,) = torch.autograd.grad(loss, student)
    assert kept.ne(0).any()
    assert torch.equal(first, kept)
    assert torch.equal(second, kept)
    assert torch.equal(third, kept)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, student)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factor_of_the_outer_graph_is_not_rounded(kind: str, dtype: torch.dtype) -> None:
    """1/3 in bfloat16 is off by 0.13 %: the same for all entries, it would not average out."""
    # Many entries of one size: rounding errors that are not common to all average out.
    student, teacher = logits(40, 300, seed=20, dtype=dtype) / 8, logits(40, 300, seed=21) / 8
    leaf = student.clone().requires_grad_()
    (KINDS[kind]()(leaf, teacher) * (1 / 3)).backward()
    exact = student.double().requires_grad_()
    (KINDS[kind]()(exact, teacher) * (1 / 3)).backward()
    bias = (leaf.grad.double() * exact.grad).sum() / exact.grad.square().sum() - 1
    assert abs(bias.item()) < (1e-6 if dtype == torch.float32 else 3e-4)


def test_float16_gradient_survives_until_the_loss_scaler() -> None:
    student, teacher = logits(2, 32768, seed=22, dtype=torch.float16) / 10, logits(2, 32768, seed=23) / 10
    leaf = student.clone().requires_grad_()
    (kl_divergence_loss()(leaf, teacher, num_items=4096) * 65536).backward()
    exact = student.double().requires_grad_()
    kl_divergence_loss()(exact, teacher, num_items=4096).backward()
    torch.testing.assert_close(leaf.grad.double() / 65536, exact.grad, rtol=1e-3, atol=1e-12)


@kinds
def test_no_graph_where_no_gradient_is_asked_for(kind: str) -> None:
    student, teacher = logits(5, 30, seed=24), logits(5, 30, seed=25)
    expected, _ = value_and_gradient(KINDS[kind](), student, teacher)
    assert torch.equal(KINDS[kind]()(student, teacher), expected)
    assert KINDS[kind]()(student, teacher).grad_fn is None
    with torch.no_grad():
        assert KINDS[kind]()(student.requires_grad_(), teacher).grad_fn is None


@kinds
def test_autocast_changes_nothing(kind: str) -> None:
    student, teacher = logits(5, 30, seed=26), logits(5, 30, seed=27)
    expected, expected_gradient = value_and_gradient(KINDS[kind](), student, teacher)
    with torch.autocast("cpu", torch.bfloat16):
        value, gradient = value_and_gradient(KINDS[kind](), student, teacher)
    assert torch.equal(value, expected)
    assert torch.equal(gradient, expected_gradient)


@kinds
def test_teacher_that_learns_too(kind: str) -> None:
    student, teacher = logits(3, 9, seed=28).double(), logits(3, 9, seed=29).double()
    student[:, 1], teacher[:, 2] = -math.inf, -math.inf
    student[2], teacher[2] = math.nan, math.nan
    mask = torch.tensor([True, True, False])
    loss = KINDS[kind](temperature=2.0)
    expected, expected_gradient = value_and_gradient(loss, student, teacher, mask=mask)
    value, gradient = value_and_gradient(loss, student, teacher.clone().requires_grad_(), mask=mask)
    torch.testing.assert_close(value, expected)
    if kind == "jsd":  # a floor reached passes no gradient in autograd: KL differs where only one side is banned
        torch.testing.assert_close(gradient, expected_gradient)
    finite_s, finite_t = (logits(3, 9, seed=s).double().requires_grad_() for s in (30, 31))
    assert torch.autograd.gradcheck(lambda s, t: loss(s, t, mask=mask), (finite_s, finite_t))
    both, _ = torch.autograd.grad(loss(finite_s, finite_t, mask=mask), (finite_s, finite_t))
    (alone,) = torch.autograd.grad(loss(finite_s, finite_t.detach(), mask=mask), finite_s)
    torch.testing.assert_close(both, alone)
    learned = teacher.clone().requires_grad_()
    loss(student, learned, mask=mask).backward()
    assert learned.grad.isfinite().all()
    assert learned.grad[2].eq(0).all()
    assert learned.grad[:2].ne(0).any()


# --- Objects and refusals


@pytest.mark.parametrize("loss", [kl_divergence_loss(temperature=2.0, reverse=True), jsd_loss(beta=0.2, chunk_size=5)])
def test_pickles_and_shows_itself(loss: Loss) -> None:
    again = pickle.loads(pickle.dumps(loss))
    assert again == loss
    assert eval(repr(loss)) == loss
    with pytest.raises(AttributeError):
        loss.temperature = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("make", [kl_divergence_loss, jsd_loss])
@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, math.nan, math.inf, "2", None, True])
def test_bad_temperature(make: Callable[..., Loss], temperature: Any) -> None:
    with pytest.raises(ConfigError, match=r"^temperature="):
        make(temperature=temperature)


@pytest.mark.parametrize("make", [kl_divergence_loss, jsd_loss])
@pytest.mark.parametrize("chunk_size", [-1, 1.5, 2.0, "1", None, True])
def test_bad_chunk_size(make: Callable[..., Loss], chunk_size: Any) -> None:
    with pytest.raises(ConfigError, match=r"^chunk_size="):
        make(chunk_size=chunk_size)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 1.1, math.nan, "0.5", None])
def test_bad_beta(beta: Any) -> None:
    with pytest.raises(ConfigError, match=r"^beta="):
        jsd_loss(beta=beta)


@kinds
@pytest.mark.parametrize(
    ("student", "teacher", "kwargs", "message"),
    [
        (torch.zeros(2, 5), torch.zeros(2, 6), {}, r"teacher=\(2, 6\).*\(2, 5\)"),
        (torch.zeros(2, 5), torch.zeros(1, 5), {}, r"teacher=\(1, 5\).*\(2, 5\)"),
        (torch.zeros(()), torch.zeros(()), {}, r"student=\(\)"),
        (torch.zeros(3, 0), torch.zeros(3, 0), {}, r"student=\(3, 0\)"),
        (torch.zeros(2, 5), torch.zeros(2, 5).long(), {}, "teacher=torch.int64"),
        (torch.zeros(2, 5), torch.zeros(2, 5, device="meta"), {}, "teacher=.*meta.*cpu"),
        (torch.zeros(2, 5), torch.zeros(2, 5), {"mask": torch.ones(3).bool()}, r"mask=\(3,\).*\(2,\).*\(2, 5\)"),
        (torch.zeros(2, 5), torch.zeros(2, 5), {"mask": torch.ones(2, 5).bool()}, r"mask=\(2, 5\).*\(2,\)"),
        (torch.zeros(2, 5), torch.zeros(2, 5), {"mask": torch.ones(2).long()}, "mask=torch.int64.*torch.bool"),
        (torch.zeros(2, 5), torch.zeros(2, 5), {"mask": torch.ones(2, device="meta").bool()}, "mask=.*meta.*cpu"),
        (torch.zeros(2, 5), torch.zeros(2, 5), {"num_items": -1}, "num_items=-1"),
        (torch.zeros(2, 5), torch.zeros(2, 5), {"num_items": math.nan}, "num_items=nan"),
        (torch.zeros(2, 5), torch.zeros(2, 5), {"num_items": torch.ones(2)}, r"num_items=\(2,\)"),
    ],
)
def test_bad_inputs(
    kind: str, student: torch.Tensor, teacher: torch.Tensor, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        KINDS[kind]()(student, teacher, **kwargs)


def test_losses_do_not_import_ray() -> None:
    code = "import sys, silverspoon_ray.losses; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
