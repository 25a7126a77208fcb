"""Losses by name, as configuration files and the command line ask for them, and what a loss can be called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.contrastive import contrastive_loss
from silverspoon_ray.losses.divergence import KLDivergenceLoss, jsd_loss, kl_divergence_loss
from silverspoon_ray.losses.feature import (
    angular_magnitude_loss,
    cosine_loss,
    mse_loss,
    normalized_mse_loss,
    smooth_l1_loss,
)
from silverspoon_ray.losses.logit_lens import logit_lens_kl_loss
from silverspoon_ray.losses.mahalanobis import mahalanobis_cosine_loss, mahalanobis_mse_loss
from silverspoon_ray.losses.relational import relkd_angle_loss, relkd_da_loss, relkd_distance_loss

LossFunction = Callable[..., torch.Tensor]


def _reverse_kl(*, temperature: float = 1.0, chunk_size: int = 0) -> KLDivergenceLoss:
    return kl_divergence_loss(temperature=temperature, chunk_size=chunk_size, reverse=True)


# A factory's keywords are the keywords of `get_loss_function` for that name.
LOSS_FACTORIES: dict[str, Callable[..., LossFunction]] = {
    "kl_divergence": kl_divergence_loss,
    "kl_div": kl_divergence_loss,
    "reverse_kl": _reverse_kl,
    "jsd": jsd_loss,
    "mse": mse_loss,
    "normalized_mse": normalized_mse_loss,
    "smooth_l1": smooth_l1_loss,
    "cosine": cosine_loss,
    "angular_magnitude": angular_magnitude_loss,
    "mahalanobis_mse": mahalanobis_mse_loss,
    "mahal_mse": mahalanobis_mse_loss,
    "mahalanobis_cosine": mahalanobis_cosine_loss,
    "mahal_cosine": mahalanobis_cosine_loss,
    "logit_lens_kl": logit_lens_kl_loss,
    "contrastive": contrastive_loss,
    "relkd_distance": relkd_distance_loss,
    "relkd_angle": relkd_angle_loss,
    "relkd_distance_angle": relkd_da_loss,
    "relkd_da": relkd_da_loss,
}


def get_loss_function(loss_type: str, **kwargs: Any) -> LossFunction:
    """The loss called ``loss_type``, made with ``kwargs``.

    Args:
        loss_type: a name of `LOSS_FACTORIES`, e.g. ``"kl_divergence"``.
        kwargs: the keywords of that loss, e.g. ``temperature=2.0``.

    Returns:
        ``loss(student, teacher)``, a 0-d tensor unless ``reduction="none"`` is asked for; built-in losses also take
        ``mask=`` and ``num_items=``.

    Raises:
        ConfigError: there is no such loss, the loss has no such keyword, or a value is out of its range.
    """
    factory = LOSS_FACTORIES.get(loss_type) if isinstance(loss_type, str) else None
    if factory is None:
        raise ConfigError("loss_type", loss_type, f"no such loss{_nearest(loss_type, LOSS_FACTORIES, 'known')}")
    accepted = inspect.signature(factory).parameters
    for key, value in kwargs.items():
        if key not in accepted:
            raise ConfigError(key, value, f"no keyword of {loss_type}{_nearest(key, accepted, 'it takes')}")
    return factory(**kwargs)


def loss_keywords(loss: LossFunction) -> frozenset[str]:
    """Which of ``mask`` and ``num_items`` the loss can be given by name.

    A ``**kwargs`` does not count as taking them: such a callable may pass them on to something that fails, or drop them
    and average over padding after all, and the caller would believe that the mask was honoured. A callable without a
    readable signature (some built in C) takes none.

    Args:
        loss: a function, a callable object or an ``nn.Module``, whose ``forward`` is looked at.
    """
    # Module.__call__ has the signature (*args, **kwargs) whatever forward takes; so has a compiled module's forward.
    called = getattr(loss, "_orig_mod", loss).forward if isinstance(loss, torch.nn.Module) else loss
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in by_name and p.name in ("mask", "num_items"))


def accepts_mask(loss: LossFunction) -> bool:
    """Whether the loss can be called with both ``mask=`` and ``num_items=``; see `loss_keywords`."""
    return loss_keywords(loss) == {"mask", "num_items"}


def _nearest(name: object, known: Iterable[str], heading: str) -> str:
    names = sorted(known)
    near = get_close_matches(name, names, n=2) if isinstance(name, str) else []
    hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ";"
    return f"{hint} {heading}: {', '.join(names)}"
