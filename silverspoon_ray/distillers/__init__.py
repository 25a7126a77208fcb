"""Hugging Face Trainers that learn from a teacher."""

from silverspoon_ray.distillers.base import BaseDistiller
from silverspoon_ray.distillers.blockwise import BlockwiseDistiller
from silverspoon_ray.distillers.callbacks import SilentProgressCallback
from silverspoon_ray.distillers.diagnostics import MemoryDiagnosticsCallback
from silverspoon_ray.distillers.factory import Distiller, distiller_class
from silverspoon_ray.distillers.features import FeatureDistiller
from silverspoon_ray.distillers.holistic import HolisticDistiller
from silverspoon_ray.distillers.response_based import ResponseBasedDistiller

__all__ = [
    "BaseDistiller",
    "BlockwiseDistiller",
    "Distiller",
    "FeatureDistiller",
    "HolisticDistiller",
    "MemoryDiagnosticsCallback",
    "ResponseBasedDistiller",
    "SilentProgressCallback",
    "distiller_class",
]
