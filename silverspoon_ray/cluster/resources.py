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

# How Ray names the resource of a node's accelerator.
ACCELERATOR = "accelerator_type:"


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


def cluster_is_fixed() -> bool:
    """Whether this process started Ray by itself: then nobody will add a node, and waiting for one is in vain."""
    node = ray._private.worker._global_node
    return node is not None and bool(node.head)


def refuse_impossible(bundles: Sequence[Mapping[str, float]], purpose: str, strategy: str = "PACK") -> None:
    """Raise at once where a fixed cluster does not have the resources at all, free or not.

    Args:
        bundles: resources of each device.
        purpose: for messages, a plural.
        strategy: how the bundles are to be placed on nodes.

    Raises:
        PlacementError: with the numbers, and what would be right.
    """
    if not cluster_is_fixed():
        return
    needed, has = total(bundles), ray.cluster_resources()
    short = [name for name, amount in needed.items() if has.get(name, 0.0) < amount]
    reason = "; ".join(_short_of(name, needed[name], has) for name in short) or _no_node_for(bundles, strategy)
    if not reason:
        return
    raise PlacementError(
        f"this Ray can never offer what {purpose} need: {reason}",
        needed=needed,
        available=_relevant(ray.available_resources(), bundles),
        total=_relevant(has, bundles),
    )


def _short_of(name: str, amount: float, has: Mapping[str, float]) -> str:
    """What a cluster lacks of a resource, in the user's words, and what would be right."""
    if name == "CPU":
        return f"without GPUs each replica and worker takes a CPU slot, ray.init(num_cpus={amount:g}) offers more"
    if name == "GPU" and not has.get("GPU"):
        return "it has no GPUs; device_type='cpu' and use_gpu=False run without"
    if name == "GPU":
        return f"it has {has['GPU']:g} GPUs, and each device and worker takes its own"
    if name.startswith(ACCELERATOR):
        there = sorted(known.removeprefix(ACCELERATOR) for known in has if known.startswith(ACCELERATOR))
        choice = f"one of {', '.join(map(repr, there))}, or None" if there else "None, no node has one that Ray knows"
        return f"accelerator_type={name.removeprefix(ACCELERATOR)!r}: {choice}"
    own = sorted(known for known in has if not known.startswith(("node:", ACCELERATOR, "object_store")))
    most = f"at most {has[name]:g}" if has.get(name) else f"no node has it, known are {', '.join(own)}"
    return f"resource {name}={amount:g}: {most}"


def _no_node_for(bundles: Sequence[Mapping[str, float]], strategy: str) -> str:
    """Why nodes that have enough together cannot take the bundles; empty where they can."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def hosts(bundle: Mapping[str, float]) -> int:
        return sum(all(node.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in nodes)

    for bundle in bundles:
        if not hosts(bundle):
            return f"no single node has {_in_words(bundle)}"
    if strategy == "STRICT_PACK" and not hosts(total(bundles)):
        return f"placement_strategy='STRICT_PACK': no single node has {_in_words(total(bundles))}; 'PACK' takes several"
    if strategy == "STRICT_SPREAD" and bundles and max(map(hosts, bundles)) < len(bundles):
        return (
            f"placement_strategy='STRICT_SPREAD': {len(bundles)} devices on {len(bundles)} nodes, and "
            f"{max(map(hosts, bundles))} of {len(nodes)} could take one; 'SPREAD' or 'PACK' put several on a node"
        )
    return ""


def _in_words(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def reserve(bundles: Sequence[Mapping[str, float]], strategy: str, timeout_s: float, purpose: str) -> PlacementGroup:
    """Reserve bundles of resources.

    Args:
        bundles: resources of each device.
        strategy: the placement group's strategy.
        timeout_s: how long to wait, e.g. for an autoscaler.
        purpose: for messages, a plural, e.g. ``"the devices of the teacher's replica 0"``.

    Raises:
        PlacementError: not to be had in time; nothing stays reserved.
    """
    refuse_impossible(bundles, purpose, strategy)
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


def check_room(
    bundles: Sequence[Mapping[str, float]],
    strategy: str,
    timeout_s: float,
    purpose: str,
    beside: Sequence[Mapping[str, float]] = (),
) -> None:
    """Make sure that the bundles are to be had now: reserve them and give them back.

    Ray Train itself would wait for its workers without an end.

    Args:
        bundles, strategy, timeout_s, purpose: see :func:`reserve`.
        beside: what must be free besides, wherever that is.

    Raises:
        PlacementError: not to be had in time.
    """
    reserved: list[PlacementGroup] = []
    try:
        for wanted, how in ((bundles, strategy), (beside, "PACK")):
            if wanted:  # none in Ray Train's local mode, which has no workers
                reserved.append(reserve(wanted, how, timeout_s, purpose))
    finally:
        for group in reserved:
            remove_placement_group(group)


def _relevant(resources: Mapping[str, float], bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in total(bundles)}
