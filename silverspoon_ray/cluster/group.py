"""The teacher as an actor group."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import nn

from silverspoon_ray.cluster.codec import encode
from silverspoon_ray.cluster.handle import AnswerLateError, TeacherHandle, get
from silverspoon_ray.cluster.layouts.pipeline import EXAMPLE, TeacherStage, ask_pipeline
from silverspoon_ray.cluster.layouts.ranks import TeacherLeader, TeacherRank
from silverspoon_ray.cluster.resources import ACCELERATOR, cluster_device_type, refuse_impossible, reserve
from silverspoon_ray.cluster.worker import TeacherSpec, TeacherWorker
from silverspoon_ray.errors import ConfigError, TeacherError
from silverspoon_ray.models.example import example_inputs
from silverspoon_ray.models.source import ModelSource, check_source, known_structure, located
from silverspoon_ray.teacher.compiled import check_compile_settings
from silverspoon_ray.teacher.layout import check_layout
from silverspoon_ray.teacher.placement import TeacherPlacement
from silverspoon_ray.teacher.protocol import TeacherRequest
from silverspoon_ray.teacher.stages import PipelinePlan

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
        cls,
        teacher: ModelSource,
        placement: TeacherPlacement | Mapping[str, Any] | None = None,
        *,
        torch_compile: Mapping[str, Any] | None = None,
        **load_kwargs: Any,
    ) -> TeacherGroup:
        """Reserve devices, start the replicas and load the model.

        Args:
            teacher: a model directory or hub id, a callable without arguments, or a module.
            placement: a mapping of its keywords will do. None: one replica on one device.
            torch_compile: ``{"backend": ..., "mode": ...}`` of torch.compile, for the teacher's layers; ``{}``: its
                defaults. None: nothing is compiled. Tensor-parallel teachers are not, and say so in the log.
            load_kwargs: passed to ``from_pretrained`` (dtype, attn_implementation, ...); of a directory or hub id.

        Raises:
            ConfigError: the teacher is no model source or cannot be laid out so; before anything is reserved, except
                where only a forward of the model's stages shows it, which nothing outlives.
            PlacementError: the devices were not to be had within ``placement.startup_timeout_s``.
            TeacherError: the model could not be loaded, or not within that time.
        """
        check_source("teacher", teacher)
        teacher = located(teacher)
        if torch_compile is not None:
            check_compile_settings(torch_compile)
        placement = TeacherPlacement.from_value(placement or {})
        check_load_keywords(teacher, load_kwargs)
        if not ray.is_initialized():
            ray.init()
        deadline = time.monotonic() + placement.startup_timeout_s
        device_type = placement.device_type or cluster_device_type()
        bundle = device_bundle(placement, device_type)
        structure = known_structure(teacher)
        if placement.strategy == "tp" and placement.num_devices > 1 and not isinstance(teacher, str):
            structure = None  # a module or callable cannot be loaded part by part
        check_layout(structure, placement)
        spec = TeacherSpec(
            source=None if isinstance(teacher, nn.Module) else teacher,
            module=ray.put(teacher) if isinstance(teacher, nn.Module) else None,
            load_kwargs=load_kwargs,
            device_type=device_type,
            threads=max(1, int(bundle.get("CPU", 1))),
            strategy=placement.strategy,
            wrap_cls=placement.wrap_cls,
            torch_compile=torch_compile,
        )
        everything = [bundle] * (placement.num_devices * placement.replicas)
        devices = f"the teacher's devices (num_devices={placement.num_devices}, replicas={placement.replicas})"
        refuse_impossible(everything, devices)
        refuse_impossible([bundle] * placement.num_devices, devices, placement.placement_strategy)
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
                _start_replica(spec, rank, placement.num_devices, bundle, group, replicas[-1])
            # All at once: they load at the same time. Ranks of one process group are called by their leader.
            grouped = placement.strategy != "pp" and placement.num_devices > 1
            starts = [
                (rank, worker.ready.remote())
                for rank, replica in enumerate(replicas)
                for worker in (replica[:1] if grouped else replica)
            ]
            for rank, start in starts:
                remaining = max(deadline - time.monotonic(), 0.0)
                where = get(start, remaining, "the teacher's start", rank)
                logger.info("teacher replica %d: pid %d on node %s", rank, where["pid"], where["node_id"])
            plan = get(replicas[0][0].plan.remote(), ANSWER_TIMEOUT_S, "the teacher's plan")
            if plan is not None:
                _try_pipelines(replicas, plan, deadline)
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


def check_load_keywords(teacher: ModelSource, load_kwargs: Mapping[str, Any]) -> None:
    """Refuse keywords that would not arrive at ``from_pretrained``, or are none of its own.

    Raises:
        ConfigError: naming one.
    """
    for key, value in load_kwargs.items():
        if key in TeacherPlacement.__dataclass_fields__:
            raise ConfigError(key, value, f"a keyword of the placement: TeacherPlacement({key}={value!r})")
        if not isinstance(teacher, str):
            expected = "left out: only a teacher that is a directory or hub id is loaded with keywords"
            raise ConfigError(key, value, expected)


def device_bundle(placement: TeacherPlacement, device_type: str) -> dict[str, float]:
    """The resources of one of the teacher's devices."""
    bundle: dict[str, float] = {"CPU": 1.0}
    if device_type == "cuda":
        bundle["GPU"] = 1.0
    if placement.accelerator_type is not None:
        bundle[f"{ACCELERATOR}{placement.accelerator_type}"] = 0.001
    bundle.update(placement.resources_per_device or {})
    return bundle


def _start_replica(
    spec: TeacherSpec, rank: int, devices: int, bundle: dict[str, float], group: PlacementGroup, actors: list[Any]
) -> None:
    """Start the actors of one replica and add them to ``actors``, the one that answers first."""
    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}

    def start(actor: type, device: int, *arguments: Any, retries: int = MAX_RESTARTS) -> Any:
        started = (
            ray.remote(actor)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                resources=custom,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=device),
                max_restarts=MAX_RESTARTS,
                # A request gives the same answer every time, so Ray may simply run it again.
                max_task_retries=retries,
            )
            .remote(spec, rank, *arguments)
        )
        actors.append(started)
        return started

    if devices == 1:
        start(TeacherWorker, 0)
    elif spec.strategy == "pp":
        for device in range(devices):
            start(TeacherStage, device, device, devices)
    else:
        # A rank that comes back is no member of its group any more: its leader has to know, and tries again itself.
        others = [start(TeacherRank, device, device, devices, retries=0) for device in range(1, devices)]
        start(TeacherLeader, 0, devices, others)
        actors.insert(0, actors.pop())


def _try_pipelines(replicas: list[list[Any]], plan: PipelinePlan, deadline: float) -> None:
    """Send an example down each pipeline: whether a model can be cut shows in its forward, not in its modules.

    Raises:
        ConfigError: it cannot.
        TeacherError: the answer did not come by ``deadline``.
    """

    def remaining() -> float:
        return max(deadline - time.monotonic(), 0.0)

    example = example_inputs(get(replicas[0][0].structure.remote(), remaining(), "the teacher's structure"))
    if example is None:
        logger.debug("the teacher does not say what it takes: whether it can be cut shows at the first batch")
        return
    batch = ray.put(encode(example))
    answers = [ask_pipeline(stages, plan, batch, TeacherRequest(), EXAMPLE) for stages in replicas]
    for rank, answer in enumerate(answers):
        try:
            get(answer, remaining(), "the teacher's answer to an example", rank)
        except AnswerLateError:
            raise
        except TeacherError as error:  # it may need more than its main input
            logger.debug("the teacher's stages could not be tried: %s", error)


def _release(workers: list[Any], groups: list[PlacementGroup]) -> None:
    if not ray.is_initialized():
        return  # the cluster is gone, and everything with it
    for worker in workers:
        ray.kill(worker)
    for group in groups:
        remove_placement_group(group)
