"""Can this teacher be laid out as its placement says?"""

from __future__ import annotations

from torch import nn

from silverspoon_ray.teacher.distributed import check_tensor_parallel, layers_to_wrap
from silverspoon_ray.teacher.placement import TeacherPlacement
from silverspoon_ray.teacher.stages import plan_pipeline


def check_layout(structure: nn.Module | None, placement: TeacherPlacement) -> None:
    """Refuse a layout that the teacher cannot have, as far as its structure is known without loading it.

    Args:
        structure: the model on the meta device; None where it shows only when it is built.
        placement: where it is to run.

    Raises:
        ConfigError: naming what would be right.
    """
    if placement.num_devices == 1:
        return
    if placement.strategy == "tp":
        check_tensor_parallel(structure, placement.num_devices)
    elif structure is not None and placement.strategy == "pp":  # else the first stage will say it
        plan_pipeline(structure, placement.num_devices, "teacher_placement.num_devices")
    elif structure is not None:
        layers_to_wrap(structure, placement.wrap_cls)
