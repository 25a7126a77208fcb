"""Kinds of students whose intermediate features learn, and what that means for each, written down without a batch.

As in :mod:`tests.distillers.kinds`: float64, one sample at a time, no padding and no mask. Features are picked up by
hooks of this file's own.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from silverspoon_ray import GenericLinearProjector, create_alignments
from tests.distillers import kinds
from tests.distillers.kinds import CLASSES, FURTHER, Kind, Sample, kind_of
from tests.support import VOCABULARY, seeded

LEARNING_RATE = 0.1
WEIGHTS = (3.0, 1.0, 0.5, 2.0)
"""``loss_weight`` of the first, second, ... alignment."""


class ConvNet(nn.Module):
    """Features of rank 4: two convolutions, a mean over the image, a classifier."""

    def __init__(self, seed: int, layers: int, channels: int = 3) -> None:
        super().__init__()
        with seeded(seed):
            sizes = [1] + [channels] * layers
            pairs = itertools.pairwise(sizes)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.Tanh()) for a, b in pairs)
            self.head = nn.Linear(channels, CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            pixel_values = block(pixel_values)
        return self.head(pixel_values.mean((2, 3)))


def wide_llama(seed: int, layers: int) -> nn.Module:
    """As :func:`tests.distillers.kinds.llama`, but 24 wide."""
    config = copy.deepcopy(kinds.llama(0, layers).config)
    config.hidden_size, config.head_dim = 24, 6
    with seeded(seed):
        return type(kinds.llama(0, 1))(config)


def perceptron(seed: int, layers: int) -> nn.Module:
    return kinds.perceptron(seed, 1)


FURTHER["conv"] = Kind(ConvNet, kinds.images, kinds.class_rows, {})


@dataclass(frozen=True)
class FeatureKind:
    """A kind of student.

    Attributes:
        base: the name in :data:`tests.distillers.kinds.KINDS`: data, padding, the task loss.
        modules: the patterns of the alignments.
        student, teacher: the models' makers, where they are not the base's.
        layers: of student and teacher.
        sizes: feature sizes of student and teacher, where they differ.
        dim: the dimension that holds the features.
    """

    base: str
    modules: dict[str, str]
    student: Callable[[int, int], nn.Module] | None = None
    teacher: Callable[[int, int], nn.Module] | None = None
    layers: tuple[int, int] = (2, 3)
    sizes: tuple[int, int] | None = None
    dim: int = -1
    size: int = 16

    def models(self) -> tuple[nn.Module, nn.Module]:
        """The student and the teacher."""
        make = kind_of(self.base).model
        return (self.student or make)(0, self.layers[0]), (self.teacher or make)(5, self.layers[1])

    def projector(self, number: int, which: str) -> nn.Module | None:
        """``"input"``: from the teacher's size to the student's; ``"output"``: back."""
        if self.sizes is None:
            return None
        student, teacher = self.sizes
        with seeded(10 * number + len(which)):
            return GenericLinearProjector(*((teacher, student) if which == "input" else (student, teacher)))


FEATURES = {
    "llama": FeatureKind("llama", {r"model\.layers\.[12]": r"model\.layers\.[01]"}),
    "gpt2": FeatureKind("gpt2", {r"transformer\.h\.[12]": r"transformer\.h\.[01]"}),
    "bert_mlm": FeatureKind("bert_mlm", {r"bert\.encoder\.layer\.[12]": r"bert\.encoder\.layer\.[01]"}),
    "t5": FeatureKind("t5", {r"(encoder|decoder)\.block\.[12]": r"\1\.block\.[01]"}),
    "vit": FeatureKind("vit", {r"vit\.layers\.[12]": r"vit\.layers\.[01]"}),
    "conv": FeatureKind("conv", {r"blocks\.[02]": r"blocks\.[01]"}, dim=1, size=3),
    "perceptron": FeatureKind(
        "perceptron", {r"layers\.[02]": r"layers\.[02]"}, student=perceptron, teacher=perceptron, size=0
    ),
    "wide_llama": FeatureKind(
        "llama", {r"model\.layers\.[12]": r"model\.layers\.[01]"}, teacher=wide_llama, sizes=(16, 24), size=24
    ),
}


# ---- losses, by the book -------------------------------------------------------------------------------------


def bend(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """A user's own loss: a mean, without ``mask`` and ``num_items``."""
    return ((student - teacher).square() + 0.01).sqrt().mean()


def head(size: int) -> nn.Module:
    with seeded(3):
        return nn.Linear(size, VOCABULARY).requires_grad_(False)


@dataclass(frozen=True)
class FeatureLoss:
    """A loss as a distiller gets it, and the sum over rows ``[n, features]`` that it stands for."""

    name: Any
    of_rows: Callable[[torch.Tensor, torch.Tensor, FeatureKind], torch.Tensor]
    keywords: Callable[[FeatureKind], dict[str, Any]] = field(default=lambda kind: {})
    per_sample: bool = False


def _lens(student: torch.Tensor, teacher: torch.Tensor, kind: FeatureKind) -> torch.Tensor:
    made = head(kind.size).double()
    return kinds.kl(made(student), made(teacher), 2.0)


LOSSES = {
    "mse": FeatureLoss("mse", lambda s, t, kind: (s - t).square().mean(-1).sum()),
    "cosine": FeatureLoss(
        "cosine",
        lambda s, t, kind: (1 - torch.cosine_similarity(s, t, dim=-1)).sum(),
        lambda kind: {"dim": kind.dim},
    ),
    "own": FeatureLoss(bend, lambda s, t, kind: ((s - t).square() + 0.01).sqrt().mean(-1).sum()),
    "logit_lens": FeatureLoss(
        "logit_lens_kl", _lens, lambda kind: {"output_head": head(kind.size), "temperature": 2.0}, per_sample=True
    ),
}


def alignments_of(name: str, loss: str, student: nn.Module, teacher: nn.Module, **keywords: Any) -> Any:
    """Alignments with weights of their own, and with projectors where widths differ."""
    kind, chosen = FEATURES[name], LOSSES[loss]
    made = create_alignments(
        teacher,
        student,
        kind.modules,
        loss_function=chosen.name,
        loss_function_kwargs=chosen.keywords(kind),
        auto_projector=False,
        **keywords,
    )
    for number, alignment in enumerate(made):
        alignment.loss_weight = WEIGHTS[number]
        alignment.output_projector = kind.projector(number, "output")
    return made


# ---- features of one sample -----------------------------------------------------------------------------------


@contextmanager
def watched(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """By name ``(args, kwargs, output)`` of the modules' last calls."""
    seen: dict[str, Any] = {}
    with ExitStack() as hooks:
        for name in names:

            def keep(module: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                seen[name] = (args, kwargs, output)

            handle = model.get_submodule(name).register_forward_hook(keep, with_kwargs=True)
            hooks.callback(handle.remove)
        yield seen


def first(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def counted_rows(features: torch.Tensor, name: str, module: str, sample: Sample) -> torch.Tensor:
    """``[n, features]``: all of a sample's rows; of a decoder's those whose label counts."""
    rows = features[0].movedim(max(FEATURES[name].dim - 1, -1), -1)
    if module.startswith("decoder"):
        rows = rows[sample["labels"] != -100]
    return rows.reshape(-1, rows.shape[-1])


def on_teachers_input(call: Any, given: torch.Tensor, block: nn.Module, projector: nn.Module | None) -> torch.Tensor:
    """A student's block called as the student calls it, but on the teacher's hidden states."""
    args, kwargs, _ = call
    given = given if projector is None else projector(given)
    return first(block(given, *args[1:], **kwargs) if args else block(**{**kwargs, "hidden_states": given}))


def reference(
    name: str, loss: str, distiller: str, alpha: float, steps: Iterable[list[Sample]]
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Plain SGD in float64.

    Returns:
        each step's losses by log key, and the parameters of student and projectors after the last.
    """
    kind, chosen = FEATURES[name], LOSSES[loss]
    rows_of = kind_of(kind.base).rows
    student, teacher = (model.double() for model in kind.models())
    teacher.eval()
    for module in (*student.modules(), *teacher.modules()):
        if hasattr(module, "config"):
            module.config.use_cache = False  # a block is called a second time, with the arguments of the first
    aligned = alignments_of(name, loss, student, teacher)
    whose = [(alignment.teacher_module_name, alignment.student_module_name) for alignment in aligned]
    outputs = [module.double() if (module := kind.projector(i, "output")) else None for i in range(len(whose))]
    inputs = [module.double() if (module := kind.projector(i, "input")) else None for i in range(len(whose))]
    trained = dict(student.named_parameters())
    for number, pair in enumerate(zip(inputs, outputs, strict=True)):
        for which, module in zip(("input", "output"), pair, strict=True):
            if module is not None and (which == "output" or distiller == "blockwise"):
                trained |= {f"{number}.{which}.{key}": value for key, value in module.named_parameters()}
    history = []
    for samples in steps:
        sums = [torch.zeros((), dtype=torch.float64) for _ in whose]
        counts = [0] * len(whose)
        hard, labels = torch.zeros((), dtype=torch.float64), 0
        for sample in samples:
            with torch.no_grad(), watched(teacher, [pair[0] for pair in whose]) as taught:
                rows_of(teacher, sample)
            with torch.set_grad_enabled(distiller == "holistic"), watched(student, [p[1] for p in whose]) as own:
                logits, targets = rows_of(student, sample)
            hard, labels = hard + kinds.task(logits, targets), labels + len(targets)
            for number, (there, here) in enumerate(whose):
                args, kwargs, output = taught[there]
                if distiller == "holistic":
                    features = first(own[here][2])
                else:
                    given = args[0] if args else kwargs["hidden_states"]
                    features = on_teachers_input(own[here], given, student.get_submodule(here), inputs[number])
                projector = outputs[number]
                features = features if projector is None else projector(features)
                rows = [counted_rows(value, name, here, sample) for value in (features, first(output))]
                sums[number] = sums[number] + chosen.of_rows(rows[0], rows[1], kind)
                counts[number] += 1 if chosen.per_sample else len(rows[0])
        means = [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
        weighted = sum((weight * mean for weight, mean in zip(WEIGHTS, means, strict=False)), torch.zeros(()))
        hard = hard / max(labels, 1)
        total = (1 - alpha) * weighted + alpha * hard if alpha else weighted
        gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(trained.values(), gradients, strict=True):
                if gradient is not None:
                    parameter -= LEARNING_RATE * gradient
        found = {f"loss/.{here}": mean.item() for (_, here), mean in zip(whose, means, strict=True)}
        found["loss"] = total.item()
        if alpha:
            found |= {"loss/hard": hard.item(), "loss/alignment": weighted.item()}
        history.append(found)
    return history, {key: value.detach() for key, value in trained.items()}
