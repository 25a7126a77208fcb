"""Losses between what the student and the teacher computed. Nothing here knows about Ray."""

from silverspoon_ray.losses.divergence import (
    JSDLoss,
    KLDivergenceLoss,
    jsd_loss,
    kl_divergence_loss,
)
from silverspoon_ray.losses.registry import (
    LossFunction,
    accepts_mask,
    get_loss_function,
    loss_keywords,
)

__all__ = [
    "JSDLoss",
    "KLDivergenceLoss",
    "LossFunction",
    "accepts_mask",
    "get_loss_function",
    "jsd_loss",
    "kl_divergence_loss",
    "loss_keywords",
]
