"""Which modules of a teacher teach which modules of a student, and what stands between them."""

from silverspoon_ray.alignments.alignment import Alignment
from silverspoon_ray.alignments.describe import AlignmentList, described
from silverspoon_ray.alignments.fusion import fuse_projectors_into_module
from silverspoon_ray.alignments.matching import create_alignments
from silverspoon_ray.alignments.projectors import GenericConv2dProjector, GenericLinearProjector
from silverspoon_ray.alignments.selector import OutputSelector

__all__ = [
    "Alignment",
    "AlignmentList",
    "GenericConv2dProjector",
    "GenericLinearProjector",
    "OutputSelector",
    "create_alignments",
    "described",
    "fuse_projectors_into_module",
]
