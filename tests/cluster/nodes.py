"""A cluster of several nodes on this machine, for ``test_nodes.py``: a Ray of its own, so in a process of its own."""

from __future__ import annotations

import sys
import time
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from silverspoon_ray import TeacherGroup, TeacherPlacement
from silverspoon_ray.errors import PlacementError, TeacherError
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherRequest
from tests.support import llama

BATCH = {"input_ids": torch.arange(1, 25).view(4, 6)}
WORKER = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def main(spare: bool, strategy: str) -> None:
    """Two stages on two nodes; then the second one's node goes.

    Args:
        spare: there is a third node to which the stage can move.
        strategy: ``"pp"``.
    """
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"head": 1}})
    nodes = [cluster.add_node(num_cpus=1, resources={"teacher": 1}) for _ in range(3 if spare else 2)]
    ray.init(address=cluster.address, runtime_env={"env_vars": WORKER}, log_to_driver=False, logging_level="error")
    try:
        model = llama(2, 32, 3).eval()
        placement: dict[str, Any] = {
            "strategy": strategy,
            "num_devices": 2,
            "placement_strategy": "STRICT_SPREAD",
            "resources_per_device": {"teacher": 0.5},
        }
        expected = LocalTeacher(model).answer({**BATCH, "use_cache": False}, TeacherRequest()).logits
        if not spare:
            try:
                TeacherGroup.create(model, TeacherPlacement(**{**placement, "num_devices": 3, "startup_timeout_s": 4}))
            except PlacementError as error:
                print("THREE refused:", str(error)[:60])
        with TeacherGroup.create(model, TeacherPlacement(**placement)) as group:
            where = [stats["node_id"] for stats in group.stats()]
            print("NODES", len(set(where)))
            assert torch.equal(group.handle.forward(BATCH).logits, expected)
            victim = next(node for node in nodes if node.node_id == where[1])
            stream = group.handle.open(TeacherRequest())
            answers = [stream.submit(BATCH) for _ in range(2)]
            cluster.remove_node(victim, allow_graceful=False)
            answers += [stream.submit(BATCH) for _ in range(2)]
            group.handle.timeout_s = 120.0 if spare else 15.0
            begin = time.monotonic()
            try:
                for answer in answers:
                    assert torch.equal(answer.result().logits, expected)
                print("RECOVERED")
            except TeacherError as error:
                print("FAILED", round(time.monotonic() - begin), " ".join(str(error).split()))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1] == "spare", sys.argv[2])
