"""What a teacher can send for its distribution over the classes: everything, or as few bytes as will do.

Per row: all logits; the hidden state before an output head that the student side has as well (exact); the k most
probable classes with the mass of the rest (a lower bound of the divergence); or draws from the distribution (unbiased).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.chunks import row_sums, scaled, slices
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.losses.rows import arithmetic_dtype, check_positive

# Bytes of float32 logits that are worked on at a time; larger for a GPU, where a chunk must outlast its launches.
CHUNK_BYTES_CPU = 4 * 2**20
CHUNK_BYTES = 128 * 2**20


@dataclass(frozen=True)
class LogitTargets:
    """All logits [..., V], any floating dtype."""

    logits: torch.Tensor

    def __post_init__(self) -> None:
        _check_floating("logits", self.logits)

    @property
    def rows(self) -> torch.Size:
        return self.logits.shape[:-1]

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def classes(self) -> int | None:
        return self.logits.shape[-1]


@dataclass(frozen=True)
class HiddenTargets:
    """Hidden states [..., H] of the teacher, any floating dtype, and its output head of the width H.

    The logits are computed in the dtype of ``hidden``; a head in another dtype is cast at each use.
    """

    hidden: torch.Tensor
    head: OutputHead

    def __post_init__(self) -> None:
        _check_floating("hidden", self.hidden)
        if self.hidden.shape[-1] != self.head.width:
            raise ConfigError(
                "hidden", tuple(self.hidden.shape), f"the last dimension must be {self.head.width}, the head's width"
            )
        if self.hidden.device != self.head.weight.device:
            raise ConfigError("head", self.head.weight.device, f"must be on the device of hidden, {self.hidden.device}")

    @property
    def rows(self) -> torch.Size:
        return self.hidden.shape[:-1]

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def classes(self) -> int | None:
        return self.head.classes


@dataclass(frozen=True)
class _SomeClasses:
    """What is known of some classes of each row; how many there are in all it does not say."""

    indices: torch.Tensor
    log_probs: torch.Tensor

    @property
    def rows(self) -> torch.Size:
        return self.indices.shape[:-1]

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @property
    def classes(self) -> int | None:
        return None


@dataclass(frozen=True)
class TopKTargets(_SomeClasses):
    """The k most probable classes and the mass of the others.

    Attributes:
        indices: [..., k], integers (uint16, int32, int64), no class twice in a row.
        log_probs: [..., k + 1], floating: log p of those at the loss's temperature, then the logarithm of the remaining
            mass, which is -inf if there is none.
    """

    def __post_init__(self) -> None:
        _check_indexed(self.indices, self.log_probs, extra=1)


@dataclass(frozen=True)
class SampledTargets(_SomeClasses):
    """Draws from the teacher's distribution at the loss's temperature.

    Attributes:
        indices: [..., n], integers (uint16, int32, int64), repetitions as drawn.
        log_probs: [..., n], floating: log p of each.
    """

    def __post_init__(self) -> None:
        _check_indexed(self.indices, self.log_probs, extra=0)


SoftTargets = LogitTargets | HiddenTargets | TopKTargets | SampledTargets


@torch.no_grad()
def top_k_targets(logits: torch.Tensor, k: int, temperature: float) -> TopKTargets:
    """The k most probable classes of softmax(logits / T) and the remaining mass.

    The mass is summed over the other classes in the logarithm, not taken from 1: it is exact however small, and -inf
    only where all other classes are banned or there are none.

    Args:
        logits: [..., V], any floating dtype; the arithmetic is in float32, float64 for float64.
        k: how many, at least 1; more than V is V.
        temperature: T, finite and > 0.

    Returns:
        Indices as uint16 if V <= 65536, else int32; log_probs as float16 for logits in half precision, else float32.

    Raises:
        ConfigError: an argument is out of its range.
    """
    classes = _check_maker(logits, "k", k, temperature)
    k = min(k, classes)
    rows = logits.reshape(-1, classes)
    indices, log_probs = _empty(logits, k, k + 1)
    for part, chunk in _float_chunks(rows):
        found = chunk.topk(k, dim=-1).indices
        chunk = scaled(chunk, chunk, temperature)
        picked = chunk.gather(-1, found)
        # exp of the rest relative to its own maximum, so that a mass of 1e-60 is not 0
        rest = chunk.scatter_(-1, found, -torch.inf)
        largest = rest.amax(-1, keepdim=True)
        sums = row_sums(rest.sub_(largest.nan_to_num(neginf=0.0)).exp_())
        buckets = torch.cat([picked, sums.log_().add_(largest)], -1)
        indices[part] = found.to(indices.dtype)
        log_probs[part] = buckets.sub_(buckets.logsumexp(-1, keepdim=True)).to(log_probs.dtype)
    lead = logits.shape[:-1]
    return TopKTargets(indices.view(*lead, k), log_probs.view(*lead, k + 1))


@torch.no_grad()
def sampled_targets(logits: torch.Tensor, draws: int, temperature: float, uniforms: torch.Tensor) -> SampledTargets:
    """Systematic draws from softmax(logits / T): row r takes the classes at the points (i + uniforms[r]) / draws of its
    cumulative distribution, i = 0..draws-1.

    Each point is uniform on its own draws-th of [0, 1), so a class is drawn ``draws * p`` times in expectation, as by
    independent draws (random-sampling distillation, arXiv:2503.16870), but the number differs from that by less than 1.

    Args:
        logits: [..., V], any floating dtype; sums are in float64.
        draws: n >= 1.
        temperature: T, finite and > 0.
        uniforms: floating, in [0, 1), one for each row in any shape.

    Returns:
        Dtypes as of `top_k_targets`.

    Raises:
        ConfigError: an argument is out of its range.
    """
    classes = _check_maker(logits, "draws", draws, temperature)
    rows = logits.reshape(-1, classes)
    if not uniforms.is_floating_point() or uniforms.numel() != len(rows):
        raise ConfigError(
            "uniforms", f"{uniforms.dtype} {tuple(uniforms.shape)}", f"must be {len(rows)} floating numbers, one a row"
        )
    points = uniforms.reshape(-1, 1).to(logits.device, torch.float64) + torch.arange(
        draws, dtype=torch.float64, device=logits.device
    )
    indices, log_probs = _empty(logits, draws, draws)
    for part, chunk in _float_chunks(rows):
        chunk = scaled(chunk, chunk, temperature)
        steps = chunk.exp().cumsum(-1, dtype=torch.float64)
        total = steps[:, -1:]
        # A point that rounding put at the very end would find a class after the last that has mass.
        sought = (points[part] / draws * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
        found = torch.searchsorted(steps, sought, right=True)
        indices[part] = found.to(indices.dtype)
        log_probs[part] = (chunk.gather(-1, found) - total.log()).to(log_probs.dtype)
    lead = logits.shape[:-1]
    return SampledTargets(indices.view(*lead, draws), log_probs.view(*lead, draws))


def _float_chunks(rows: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Copies of chunks of rows in the dtype of the arithmetic, which may be overwritten."""
    dtype = arithmetic_dtype(rows)
    aim = CHUNK_BYTES_CPU if rows.device.type == "cpu" else CHUNK_BYTES
    for part in slices(len(rows), max(1, aim // (dtype.itemsize * rows.shape[-1]))):
        yield part, rows[part].to(dtype, copy=True)


def _empty(logits: torch.Tensor, indices: int, log_probs: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, classes = logits.shape[:-1].numel(), logits.shape[-1]
    half = logits.dtype.itemsize < 4
    return (
        torch.empty(rows, indices, dtype=torch.uint16 if classes <= 2**16 else torch.int32, device=logits.device),
        torch.empty(rows, log_probs, dtype=torch.float16 if half else torch.float32, device=logits.device),
    )


def _check_maker(logits: torch.Tensor, key: str, count: int, temperature: float) -> int:
    _check_floating("logits", logits)
    check_positive("temperature", temperature)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(key, count, "must be a whole number >= 1")
    return logits.shape[-1]


def _check_floating(key: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise ConfigError(key, tensor.dtype, "must be of a floating dtype")
    if tensor.ndim == 0 or tensor.shape[-1] == 0:
        raise ConfigError(key, tuple(tensor.shape), "needs a last dimension of at least 1")


def _check_indexed(indices: torch.Tensor, log_probs: torch.Tensor, *, extra: int) -> None:
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise ConfigError("indices", indices.dtype, "must be of an integer dtype")
    _check_floating("log_probs", log_probs)
    if indices.ndim == 0 or indices.shape[-1] == 0:
        raise ConfigError("indices", tuple(indices.shape), "needs a last dimension of at least 1")
    expected = (*indices.shape[:-1], indices.shape[-1] + extra)
    if log_probs.shape != expected:
        raise ConfigError("log_probs", tuple(log_probs.shape), f"must be {expected} for indices {tuple(indices.shape)}")
    if log_probs.device != indices.device:
        raise ConfigError("log_probs", log_probs.device, f"must be on the indices' device {indices.device}")
