"""Training on Ray."""

from silverspoon_ray.train.trainer import DistillationTrainer

__all__ = ["DistillationTrainer"]
