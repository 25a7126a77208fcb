"""Everything that runs the teacher on Ray."""

from silverspoon_ray.cluster.group import TeacherGroup
from silverspoon_ray.cluster.handle import TeacherHandle

__all__ = ["TeacherGroup", "TeacherHandle"]
