"""The teacher as an actor group."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import nn

from silverspoon_ray.cluster.handle import TeacherHandle, get
from silverspoon_ray.cluster.layouts.pipeline import TeacherStage
from silverspoon_ray.cluster.resources import cluster_device_type, reserve
from silverspoon_ray.cluster.worker import TeacherSpec, TeacherWorker
from silverspoon_ray.models.source import ModelSource, check_source, known_structure, located
from silverspoon_ray.teacher.placement import TeacherPlacement
from silverspoon_ray.teacher.stages import plan_pipeline

logger = logging.getLogger(__name__)

# A replica that dies is brought back this often; a model that kills its process every time must not do so for ever.
MAX_RESTARTS = 8
ANSWER_TIMEOUT_S = 600.0


class TeacherGroup:
    """Replicas of a frozen teacher, each an actor on devices of its own.

    Made by :meth:`create`, which returns a group that is ready or raises and leaves nothing behind. Use it as a
    context manager, or call :meth:`shutdown`; it also ends with the Ray job that made it.

    Attributes:
        handle: the picklable end that students use.
        placement: where it runs.
    """

    def __init__(
        self,
        handle: TeacherHandle,
        placement: TeacherPlacement,
        placement_groups: list[PlacementGroup],
        spec: TeacherSpec,
    ) -> None:
        self.handle = handle
        self.placement = placement
        self._placement_groups = placement_groups
        self._spec = spec  # keeps a module of the user's in the object store for replicas that restart
        handle.owner = self
        # Where nobody shuts the group down and nobody can any more, e.g. because the task that made it has returned.
        # Not at the interpreter's exit: the cluster gives back what a job held when the job ends.
        weakref.finalize(self, _release, handle.workers, placement_groups).atexit = False

    @classmethod
    def create(
        cls, teacher: ModelSource, placement: TeacherPlacement | None = None, **load_kwargs: Any
    ) -> TeacherGroup:
        """Reserve devices, start the replicas and load the model.

        Args:
            teacher: a model directory or hub id, a callable without arguments, or a module.
            placement: None: one replica on one device.
            load_kwargs: passed to ``from_pretrained`` (dtype, attn_implementation, ...).

        Raises:
            ConfigError: the teacher is no model source; before anything is reserved.
            PlacementError: the devices were not to be had within ``placement.startup_timeout_s``.
            TeacherError: the model could not be loaded, or not within that time.
        """
        check_source("teacher", teacher)
        teacher = located(teacher)
        placement = placement or TeacherPlacement()
        if not ray.is_initialized():
            ray.init()
        deadline = time.monotonic() + placement.startup_timeout_s
        device_type = placement.device_type or cluster_device_type()
        bundle = device_bundle(placement, device_type)
        if placement.num_devices > 1:
            structure = known_structure(teacher)
            if structure is not None:  # else the first stage will say it
                plan_pipeline(structure, placement.num_devices)
        spec = TeacherSpec(
            source=None if isinstance(teacher, nn.Module) else teacher,
            module=ray.put(teacher) if isinstance(teacher, nn.Module) else None,
            load_kwargs=load_kwargs,
            device_type=device_type,
            threads=max(1, int(bundle.get("CPU", 1))),
        )
        replicas: list[list[Any]] = []
        reserved: list[PlacementGroup] = []
        try:
            for rank in range(placement.replicas):
                remaining = max(deadline - time.monotonic(), 0.0)
                group = reserve(
                    [bundle] * placement.num_devices,
                    placement.placement_strategy,
                    remaining,
                    f"the devices of the teacher's replica {rank}",
                )
                reserved.append(group)
                replicas.append([])
                for device in range(placement.num_devices):
                    replicas[-1].append(_start(spec, rank, device, placement.num_devices, bundle, group))
            # All at once: they load at the same time.
            starts = [(rank, worker.ready.remote()) for rank, replica in enumerate(replicas) for worker in replica]
            for rank, start in starts:
                remaining = max(deadline - time.monotonic(), 0.0)
                where = get(start, remaining, "the teacher's start", rank)
                logger.info("teacher replica %d: pid %d on node %s", rank, where["pid"], where["node_id"])
            plan = get(replicas[0][0].plan.remote(), ANSWER_TIMEOUT_S, "the teacher's plan")
        except BaseException:
            _release([worker for replica in replicas for worker in replica], reserved)
            raise
        # An answer may take a while even where the start may not: behind others, or behind a restart.
        handle = TeacherHandle(replicas, max(placement.startup_timeout_s, ANSWER_TIMEOUT_S), plan)
        return cls(handle, placement, reserved, spec)

    def stats(self) -> list[dict[str, Any]]:
        """See :meth:`TeacherHandle.stats`."""
        return self.handle.stats()

    def shutdown(self) -> None:
        """End the replicas and give their devices back. Calling it twice does no harm."""
        _release(self.handle.workers, self._placement_groups)
        self._placement_groups.clear()

    def __enter__(self) -> TeacherGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def device_bundle(placement: TeacherPlacement, device_type: str) -> dict[str, float]:
    """The resources of one of the teacher's devices."""
    bundle: dict[str, float] = {"CPU": 1.0}
    if device_type == "cuda":
        bundle["GPU"] = 1.0
    if placement.accelerator_type is not None:
        bundle[f"accelerator_type:{placement.accelerator_type}"] = 0.001
    bundle.update(placement.resources_per_device or {})
    return bundle


def _start(
    spec: TeacherSpec, rank: int, device: int, devices: int, bundle: dict[str, float], group: PlacementGroup
) -> Any:
    """The actor of one device of a replica."""
    worker: tuple[type, tuple[Any, ...]] = (TeacherWorker, (spec, rank))
    if devices > 1:
        worker = (TeacherStage, (spec, rank, device, devices))
    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    return (
        ray.remote(worker[0])
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            resources=custom,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=device),
            # A request gives the same answer every time, so Ray may simply run it again.
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,
        )
        .remote(*worker[1])
    )


def _release(workers: list[Any], groups: list[PlacementGroup]) -> None:
    if not ray.is_initialized():
        return  # the cluster is gone, and everything with it
    for worker in workers:
        ray.kill(worker)
    for group in groups:
        remove_placement_group(group)
