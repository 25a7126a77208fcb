"""Every loss between features, and its formula once more: in float64, by numpy, a row or pair at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from silverspoon_ray.losses import get_loss_function

Array = NDArray[np.float64]
SIZE = 5  # of the feature dimension, wherever a matrix or a head is involved
SHAPES = [(6, SIZE), (3, 4, SIZE), (4, 2, 3, SIZE)]


def features(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(inputs: int, outputs: int, seed: int) -> torch.nn.Linear:
    module = torch.nn.Linear(inputs, outputs)
    with torch.no_grad():
        module.weight.copy_(features(outputs, inputs, seed=seed))
        module.bias.copy_(features(outputs, seed=seed + 1))
    return module


def value_and_gradient(
    loss: Callable[..., torch.Tensor], student: torch.Tensor, teacher: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = student.detach().clone().requires_grad_()
    value = loss(leaf, teacher, **kwargs)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@dataclass(frozen=True)
class Kind:
    """A loss and what is true of it.

    Attributes:
        name, keywords: of `get_loss_function`; keywords that are functions make modules, which tests may change.
        formula: features of student and teacher to the loss.
        sums: it is a sum over rows, so that micro-batches add up.
        zero_at_identity: equal features have the value 0.
        teacher_learns: a teacher that asks for a gradient gets one.
        per_sample: the denominator counts samples and not rows.
    """

    name: str
    formula: Callable[[Array, Array], Any]
    keywords: dict[str, Any] = field(default_factory=dict)
    sums: bool = True
    zero_at_identity: bool = True
    teacher_learns: bool = True
    per_sample: bool = False

    def made(self, dtype: torch.dtype | None = None, factory: Callable[..., Any] = get_loss_function) -> Any:
        """The loss; its modules in ``dtype`` if that is given."""
        keywords = {key: value() if callable(value) else value for key, value in self.keywords.items()}
        loss = factory(self.name, **{k: v.to(dtype) if dtype and hasattr(v, "to") else v for k, v in keywords.items()})
        return loss.to(dtype) if dtype and isinstance(loss, torch.nn.Module) else loss


def _rows(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    return zip(*(a.reshape(-1, a.shape[-1]) for a in arrays), strict=True)


def _mean_of_rows(value: Callable[[Array, Array], Any]) -> Callable[[Array, Array], Any]:
    return lambda s, t: np.mean([value(a, b) for a, b in _rows(s, t)])


def _huber(d: Array, beta: float) -> Array:
    return np.where(abs(d) < beta, d**2 / (2 * beta or 1), abs(d) - beta / 2)


def _normalized(x: Array, eps: float) -> Array:
    return (x - x.mean()) / (x.std(ddof=1) + eps)


def _cosine(a: Array, b: Array) -> Any:
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def _angular_magnitude(alpha: float, beta: float) -> Callable[[Array, Array], Any]:
    return lambda a, b: alpha * (1 - _cosine(a, b)) + beta * (np.linalg.norm(a) - np.linalg.norm(b)) ** 2


WEIGHT = features(7, SIZE, seed=101)
W = WEIGHT.double().numpy()
M = W.T @ W
METRIC = torch.from_numpy(M).float()
HEAD = linear(SIZE, 7, 102)


def _mahalanobis_cosine(eps: float) -> Callable[[Array, Array], Any]:
    return lambda a, b: 1 - a @ M @ b / max((a @ M @ a) ** 0.5 * (b @ M @ b) ** 0.5, eps)


def _logit_lens(temperature: float) -> Callable[[Array, Array], Any]:
    weight, bias = (p.detach().double().numpy() for p in HEAD.parameters())

    def log_p(x: Array) -> Array:
        z = (weight @ x + bias) / temperature
        return z - np.log(np.exp(z).sum())

    def row(a: Array, b: Array) -> Any:
        return temperature**2 * (np.exp(log_p(b)) * (log_p(b) - log_p(a))).sum()

    return lambda s, t: sum(row(a, b) for a, b in _rows(s, t)) / len(s)


def _contrastive(temperature: float) -> Callable[[Array, Array], Any]:
    def loss(s: Array, t: Array) -> Any:
        values = []
        for i, (a,) in enumerate(_rows(s)):
            scores = np.exp([_cosine(a, b) / temperature for (b,) in _rows(t)])
            values.append(-np.log(scores[i] / scores.sum()))
        return np.mean(values)

    return loss


def _distance(s: Array, t: Array) -> Any:
    def relations(x: Array) -> Array:
        x = x.reshape(len(x), -1)
        d = np.array([[np.linalg.norm(a - b) for b in x] for a in x])
        return d / d[d > 0].mean()

    return _huber(relations(s) - relations(t), 1.0).mean()


def _angle(s: Array, t: Array) -> Any:
    def relations(x: Array) -> Array:
        x, n = x.reshape(len(x), -1), len(x)
        angles = np.zeros((n, n, n))
        for i, j, k in product(range(n), repeat=3):
            if i not in (j, k):
                angles[i, j, k] = _cosine(x[j] - x[i], x[k] - x[i])
        return angles

    return _huber(relations(s) - relations(t), 1.0).mean()


def _weighted(distance: float, angle: float) -> Callable[[Array, Array], Any]:
    return lambda s, t: distance * _distance(s, t) + angle * _angle(s, t)


_RELATIONAL: dict[str, Any] = {"sums": False, "teacher_learns": False}
_CONTRASTIVE: dict[str, Any] = {"sums": False, "zero_at_identity": False}
_LENS: dict[str, Any] = {"teacher_learns": False, "per_sample": True}

KINDS: dict[str, Kind] = {
    "mse": Kind("mse", _mean_of_rows(lambda a, b: ((a - b) ** 2).mean())),
    "mse-sum": Kind("mse", lambda s, t: ((s - t) ** 2).sum(), {"reduction": "sum"}),
    "normalized": Kind(
        "normalized_mse", _mean_of_rows(lambda a, b: ((_normalized(a, 1e-5) - _normalized(b, 1e-5)) ** 2).mean())
    ),
    "normalized-0.3": Kind(
        "normalized_mse",
        _mean_of_rows(lambda a, b: ((_normalized(a, 0.3) - _normalized(b, 0.3)) ** 2).mean()),
        {"eps": 0.3},
    ),
    "smooth": Kind("smooth_l1", _mean_of_rows(lambda a, b: _huber(a - b, 1.0).mean())),
    "smooth-0.4": Kind("smooth_l1", _mean_of_rows(lambda a, b: _huber(a - b, 0.4).mean()), {"beta": 0.4}),
    "smooth-0": Kind("smooth_l1", _mean_of_rows(lambda a, b: abs(a - b).mean()), {"beta": 0}),
    "smooth-sum": Kind("smooth_l1", lambda s, t: _huber(s - t, 1.0).sum(), {"reduction": "sum"}),
    "cosine": Kind("cosine", _mean_of_rows(lambda a, b: 1 - _cosine(a, b))),
    "angular": Kind("angular_magnitude", _mean_of_rows(_angular_magnitude(1.0, 1.0))),
    "angular-0.3-2": Kind("angular_magnitude", _mean_of_rows(_angular_magnitude(0.3, 2.0)), {"alpha": 0.3, "beta": 2}),
    "mahal-weight": Kind(
        "mahalanobis_mse", _mean_of_rows(lambda a, b: ((W @ (a - b)) ** 2).sum()), {"weight_matrix": WEIGHT}
    ),
    "mahal-metric": Kind("mahal_mse", _mean_of_rows(lambda a, b: (a - b) @ M @ (a - b)), {"metric_matrix": METRIC}),
    "mahal-cosine": Kind(
        "mahalanobis_cosine", _mean_of_rows(lambda a, b: 1 - _cosine(W @ a, W @ b)), {"weight_matrix": WEIGHT}
    ),
    "mahal-cosine-9": Kind(
        "mahal_cosine",
        _mean_of_rows(_mahalanobis_cosine(9.0)),
        {"metric_matrix": METRIC, "eps": 9.0},
        zero_at_identity=False,
    ),
    "lens": Kind("logit_lens_kl", _logit_lens(1.0), {"output_head": lambda: linear(SIZE, 7, 102)}, **_LENS),
    "lens-3": Kind(
        "logit_lens_kl", _logit_lens(3.0), {"output_head": lambda: linear(SIZE, 7, 102), "temperature": 3.0}, **_LENS
    ),
    "contrastive": Kind("contrastive", _contrastive(0.07), **_CONTRASTIVE),
    "contrastive-1": Kind("contrastive", _contrastive(1.0), {"temperature": 1.0}, **_CONTRASTIVE),
    "distance": Kind("relkd_distance", _distance, **_RELATIONAL),
    "angle": Kind("relkd_angle", _angle, **_RELATIONAL),
    "both": Kind("relkd_da", _weighted(1.0, 2.0), **_RELATIONAL),
    "both-0.5-0.2": Kind(
        "relkd_distance_angle", _weighted(0.5, 0.2), {"dist_weight": 0.5, "angle_weight": 0.2}, **_RELATIONAL
    ),
}


def having(choice: Callable[[Kind], bool]) -> pytest.MarkDecorator:
    chosen = {name: kind for name, kind in KINDS.items() if choice(kind)}
    return pytest.mark.parametrize("kind", chosen.values(), ids=chosen)


kinds = having(lambda kind: True)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
