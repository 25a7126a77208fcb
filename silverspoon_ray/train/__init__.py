"""Training on Ray.

Imported when it is used: workers that only tokenise text for a run need neither Ray Train nor transformers' Trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from silverspoon_ray.train.trainer import DistillationTrainer

__all__ = ["DistillationTrainer"]


def __getattr__(name: str) -> Any:
    if name == "DistillationTrainer":
        from silverspoon_ray.train.trainer import DistillationTrainer

        return DistillationTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
