"""Clipping, learning rates and optimizers of single alignments; each step is plain SGD, so that what a parameter moved
by, divided by the learning rate, is the gradient that was applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import silverspoon_ray
from silverspoon_ray import BlockwiseDistiller, HolisticDistiller, create_alignments
from silverspoon_ray.errors import ConfigError
from tests.distillers.kinds import KINDS, Collator
from tests.distillers.widths import WIDTHS
from tests.support import trained, training_arguments

BUILDS = [HolisticDistiller, BlockwiseDistiller]
IDS = ["holistic", "blockwise"]
RATE = 0.5
BLOCKS = ("model.layers.0.", "model.layers.1.")
PROJECTORS = ("distillation_projectors.0.", "distillation_projectors.1.")
Gradients = dict[str, torch.Tensor]


def run(build: Any, change: Callable[[Any], None] = lambda alignments: None, **arguments: Any) -> tuple[Any, Gradients]:
    """The distiller after one step, and what was applied to each parameter."""
    kind = WIDTHS["llama"]
    student, teacher = kind.student(), kind.teacher()
    alignments = create_alignments(teacher, student, kind.modules)
    change(alignments)
    built = build(
        teacher_model=teacher,
        student_model=student,
        alignments=alignments,
        train_dataset=KINDS["llama"].data(8, 1),
        data_collator=Collator("llama"),
        args=training_arguments(
            silverspoon_ray,
            **{
                "max_steps": 1,
                "optim": "sgd",
                "learning_rate": RATE,
                "lr_scheduler_type": "constant",
                "max_grad_norm": 0,
                **arguments,
            },
        ),
    )
    before = {key: value.detach().clone() for key, value in student.named_parameters()}
    trained(built)
    return built, {key: (before[key] - value.detach()) / RATE for key, value in student.named_parameters()}


def norm(gradients: Gradients, *prefixes: str) -> float:
    chosen = [value.flatten() for key, value in gradients.items() if key.startswith(prefixes)]
    assert chosen
    return torch.cat(chosen).norm().item()


def assert_same(one: Gradients, other: Gradients, *prefixes: str, factor: float = 1.0) -> None:
    keys = [key for key in one if key.startswith(prefixes)]
    assert keys
    for key in keys:
        torch.testing.assert_close(one[key], factor * other[key], rtol=1e-3, atol=1e-6, msg=key)


@pytest.mark.parametrize("general", [0, 1e6], ids=["no_general_limit", "large_general_limit"])
@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_a_limit_of_an_alignments_own(build: Any, general: float) -> None:
    """The block and its projectors together are brought to it; all else is as without."""
    _, free = run(build)
    assert norm(free, BLOCKS[1], PROJECTORS[1]) > 0.1

    def limit(alignments: Any) -> None:
        alignments[1].max_grad_norm = 0.05

    built, clipped = run(build, limit, max_grad_norm=general)
    assert norm(clipped, BLOCKS[1], PROJECTORS[1]) == pytest.approx(0.05, rel=1e-3)
    scale = 0.05 / norm(free, BLOCKS[1], PROJECTORS[1])
    assert_same(clipped, free, BLOCKS[1], PROJECTORS[1], factor=scale)
    assert_same(clipped, free, BLOCKS[0], PROJECTORS[0], "model.embed_tokens", "lm_head")
    if build is BlockwiseDistiller:
        row = built.state.log_history[0]
        for number in (0, 1):
            logged = row[f"grad_norm/.model.layers.{number}"]
            assert logged == pytest.approx(norm(free, BLOCKS[number], PROJECTORS[number]), rel=1e-3)


@pytest.mark.parametrize("clip_projectors", [True, False])
@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_projectors_in_clipping(build: Any, clip_projectors: bool) -> None:
    """With ``clip_projectors=False`` they neither count nor are clipped. Blockwise has a norm per block, holistic
    one for all."""
    _, free = run(build)
    _, clipped = run(build, max_grad_norm=0.05, clip_projectors=clip_projectors)
    groups = [("",)] if build is HolisticDistiller else list(zip(BLOCKS, PROJECTORS, strict=True))
    for group in groups:
        counted = {
            k: v for k, v in clipped.items() if k.startswith(group) and (clip_projectors or "proje" not in k[:20])
        }
        assert norm(counted, "") == pytest.approx(0.05, rel=1e-3)
    if not clip_projectors:
        assert_same(clipped, free, *PROJECTORS)


@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_a_limit_of_ones_own_leaves_projectors_out(build: Any) -> None:
    def limit(alignments: Any) -> None:
        alignments[0].max_grad_norm = 0.05

    _, free = run(build)
    _, clipped = run(build, limit, clip_projectors=False)
    assert norm(clipped, BLOCKS[0]) == pytest.approx(0.05, rel=1e-3)
    assert_same(clipped, free, PROJECTORS[0])


@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_an_optimizer_of_an_alignments_own(build: Any) -> None:
    """It has the block, gets the projectors that are made later, and steps at its own rate; the rest keeps the
    distiller's."""
    own: list[torch.optim.Optimizer] = []

    def bring(alignments: Any) -> None:
        own.append(torch.optim.SGD(alignments[1].student_block.parameters(), lr=4 * RATE))
        alignments[1].optimizer = own[0]

    _, plain = run(build)
    built, applied = run(build, bring)
    assert_same(applied, plain, BLOCKS[1], PROJECTORS[1], factor=4.0)
    assert_same(applied, plain, BLOCKS[0], PROJECTORS[0], "model.embed_tokens", "lm_head")
    held = {id(p) for group in own[0].param_groups for p in group["params"]}
    alignment = built.alignments[1]
    wanted = [alignment.student_block, *alignment.projectors.values()]
    assert held == {id(p) for module in wanted for p in module.parameters()}
    everywhere = [id(p) for group in built.optimizer.param_groups for p in group["params"]]
    assert len(everywhere) == len(set(everywhere)), "a parameter is stepped twice"


@pytest.mark.parametrize("everyone", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_a_scheduler_of_an_alignments_own(build: Any, everyone: bool) -> None:
    own: list[Any] = []

    def bring(alignments: Any) -> None:
        for alignment in alignments if everyone else alignments[1:]:
            alignment.optimizer = torch.optim.SGD(alignment.student_block.parameters(), lr=0.2)
            alignment.scheduler = torch.optim.lr_scheduler.ExponentialLR(alignment.optimizer, 0.5)
            own.append(alignment.optimizer)

    built, _ = run(build, bring, max_steps=3, lr_scheduler_type="linear")
    for optimizer in own:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 / 8)
    mine = {id(p) for optimizer in own for group in optimizer.param_groups for p in group["params"]}
    rest = [g for g in built.optimizer.param_groups if not mine & {id(p) for p in g["params"]}]
    assert [g["lr"] for g in rest] == [0.0] * len(rest)  # the distiller's schedule has come to its end
    assert bool(rest) is (build is HolisticDistiller or not everyone)


def test_a_scheduler_needs_its_optimizer() -> None:
    student, teacher = WIDTHS["llama"].student(), WIDTHS["llama"].teacher()
    optimizer = torch.optim.SGD(student.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(ConfigError, match="scheduler"):
        silverspoon_ray.Alignment(teacher.model.layers[0], student.model.layers[0], scheduler=scheduler)


@pytest.mark.parametrize("init", [None, "normal", "xavier", nn.init.zeros_])
@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_how_projectors_begin(build: Any, init: Any) -> None:
    """They are seeded by the run, and made without a number of the student's random stream."""

    def begin(alignments: Any) -> None:
        for alignment in alignments:
            alignment.projector_init = (lambda p: init(p.weight)) if callable(init) else init

    first, second = (run(build, begin, learning_rate=0.0)[0] for _ in range(2))
    for here, there in zip(first.alignments, second.alignments, strict=True):
        for which, projector in here.projectors.items():
            assert torch.equal(projector.weight, there.projectors[which].weight)
            deviation = projector.weight.std().item()
            limits = {None: (0.07, 0.09), "normal": (0.018, 0.022), "xavier": (0.125, 0.145)}.get(init, (0.0, 0.0))
            assert limits[0] <= deviation <= limits[1], which
    other = run(build, begin, learning_rate=0.0, seed=3)[0]
    same = torch.equal(first.alignments[0].output_projector.weight, other.alignments[0].output_projector.weight)
    assert same is callable(init)


@pytest.mark.parametrize(
    ("build", "per_block"),
    [(HolisticDistiller, False), (BlockwiseDistiller, False), (BlockwiseDistiller, True)],
    ids=["holistic", "blockwise", "per_block"],
)
def test_magnitude_aware_weighting(build: Any, per_block: bool) -> None:
    """Each alignment is divided by its own magnitude, so that its scale does not matter; the logs show it as it is."""
    settings = {"per_device_train_batch_size": 8, "backward_per_block": per_block}

    def without(number: int) -> Callable[[Any], None]:
        def change(alignments: Any) -> None:
            alignments[number].loss_weight = 0.0  # left out, its projectors' numbers would become the other's

        return change

    plain, _ = run(build, **settings)
    built, weighed = run(build, magnitude_aware_weighting=True, **settings)
    row, wanted_row = built.state.log_history[0], plain.state.log_history[0]
    for key in ("loss", "loss/.model.layers.0", "loss/.model.layers.1"):
        assert row[key] == pytest.approx(wanted_row[key], rel=1e-6)
    single = [run(build, without(1 - number), **settings)[1] for number in (0, 1)]
    losses = [row[f"loss/.model.layers.{number}"] for number in (0, 1)]
    # The first layer learns from both alignments of a student that is trained whole; the second only from its own.
    wanted = {key: single[1][key] / losses[1] for key in weighed if key.startswith(BLOCKS[1])}
    first = {key: single[0][key] / losses[0] for key in weighed if key.startswith(BLOCKS[0])}
    for key, value in first.items():
        wanted[key] = value + single[1][key] / losses[1] if build is HolisticDistiller else value
    for key, value in wanted.items():
        torch.testing.assert_close(weighed[key], value, rtol=1e-3, atol=1e-5, msg=key)
