"""What the tests of the collective transport share."""

from __future__ import annotations

import threading

import torch

from silverspoon_ray import TeacherGroup
from silverspoon_ray.teacher.protocol import TeacherRequest

COLLECTIVE = TeacherRequest(transport="collective")


class Sized(torch.nn.Module):
    """Its answer is as large as asked for."""

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.arange(int(numbers[0]), dtype=torch.float32) + float(numbers[1])


def sized(megabytes: float, marked: float = 0.0) -> dict[str, torch.Tensor]:
    return {"numbers": torch.tensor([int(megabytes * 2**18), int(marked)])}


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("silverspoon")]


def silent(group: TeacherGroup) -> bool:
    """No stream is served, nothing waits to be sent."""
    return all((worker["streams"], worker["unsent_bytes"]) == (0, 0) for worker in group.stats())
