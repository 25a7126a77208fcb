"""Reserving devices: within a stated time, or not at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from silverspoon_ray.errors import PlacementError

logger = logging.getLogger(__name__)

# A placement group that is feasible is granted within a second or two; after this long we say what is missing.
TELL_AFTER_S = 5.0


def total(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of resource bundles."""
    summed: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            summed[name] = summed.get(name, 0.0) + amount
    return summed


def cluster_device_type() -> str:
    """``"cuda"`` where the cluster that Ray is connected to offers GPUs, else ``"cpu"``."""
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


def reserve(bundles: Sequence[Mapping[str, float]], strategy: str, timeout_s: float, purpose: str) -> PlacementGroup:
    """Reserve bundles of resources.

    Args:
        bundles: resources of each device.
        strategy: the placement group's strategy.
        timeout_s: how long to wait, e.g. for an autoscaler.
        purpose: for messages, e.g. ``"the teacher's replica 0"``.

    Raises:
        PlacementError: not to be had in time; nothing stays reserved.
    """
    begin = time.monotonic()
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    try:
        if group.wait(min(TELL_AFTER_S, timeout_s)):
            return group
        remaining = timeout_s - (time.monotonic() - begin)
        if remaining > 0:
            logger.warning(
                "%s needs %s; the cluster has %s, %s of it free. Waiting up to %.0f s.",
                purpose,
                total(bundles),
                _relevant(ray.cluster_resources(), bundles),
                _relevant(ray.available_resources(), bundles),
                remaining,
            )
            if group.wait(remaining):
                return group
    except BaseException:
        remove_placement_group(group)
        raise
    available = _relevant(ray.available_resources(), bundles)
    remove_placement_group(group)
    raise PlacementError(
        f"no devices for {purpose} within {timeout_s:g} s, strategy {strategy}",
        needed=total(bundles),
        available=available,
        total=_relevant(ray.cluster_resources(), bundles),
        waited_s=time.monotonic() - begin,
    )


def check_room(bundles: Sequence[Mapping[str, float]], strategy: str, timeout_s: float, purpose: str) -> None:
    """Make sure that the bundles are to be had now: reserve them and give them back.

    Ray Train itself would wait for its workers without an end.

    Raises:
        PlacementError: not to be had in time.
    """
    remove_placement_group(reserve(bundles, strategy, timeout_s, purpose))


def _relevant(resources: Mapping[str, float], bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in total(bundles)}
