"""Losses between what the student and the teacher computed. Nothing here knows about Ray."""

from silverspoon_ray.losses.contrastive import ContrastiveDistillationLoss, contrastive_loss
from silverspoon_ray.losses.divergence import (
    JSDLoss,
    KLDivergenceLoss,
    jsd_loss,
    kl_divergence_loss,
)
from silverspoon_ray.losses.feature import (
    AngularMagnitudeLoss,
    CosineLoss,
    MSELoss,
    NormalizedMSELoss,
    SmoothL1Loss,
    angular_magnitude_loss,
    cosine_loss,
    mse_loss,
    normalized_mse_loss,
    smooth_l1_loss,
)
from silverspoon_ray.losses.fused import CombinedLoss, LinearStudent, combined_loss
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.losses.logit_lens import LogitLensKLLoss, logit_lens_kl_loss
from silverspoon_ray.losses.mahalanobis import (
    MahalanobisCosineLoss,
    MahalanobisMSELoss,
    mahalanobis_cosine_loss,
    mahalanobis_mse_loss,
)
from silverspoon_ray.losses.registry import (
    LossFunction,
    accepts_mask,
    get_loss_function,
    loss_keywords,
)
from silverspoon_ray.losses.relational import (
    RelationalLoss,
    relkd_angle_loss,
    relkd_da_loss,
    relkd_distance_loss,
)
from silverspoon_ray.losses.targets import (
    HiddenTargets,
    LogitTargets,
    SampledTargets,
    SoftTargets,
    TopKTargets,
    sampled_targets,
    top_k_targets,
)

__all__ = [
    "AngularMagnitudeLoss",
    "CombinedLoss",
    "ContrastiveDistillationLoss",
    "CosineLoss",
    "HiddenTargets",
    "JSDLoss",
    "KLDivergenceLoss",
    "LinearStudent",
    "LogitLensKLLoss",
    "LogitTargets",
    "LossFunction",
    "MSELoss",
    "MahalanobisCosineLoss",
    "MahalanobisMSELoss",
    "NormalizedMSELoss",
    "OutputHead",
    "RelationalLoss",
    "SampledTargets",
    "SmoothL1Loss",
    "SoftTargets",
    "TopKTargets",
    "accepts_mask",
    "angular_magnitude_loss",
    "combined_loss",
    "contrastive_loss",
    "cosine_loss",
    "get_loss_function",
    "jsd_loss",
    "kl_divergence_loss",
    "logit_lens_kl_loss",
    "loss_keywords",
    "mahalanobis_cosine_loss",
    "mahalanobis_mse_loss",
    "mse_loss",
    "normalized_mse_loss",
    "relkd_angle_loss",
    "relkd_da_loss",
    "relkd_distance_loss",
    "sampled_targets",
    "smooth_l1_loss",
    "top_k_targets",
]
