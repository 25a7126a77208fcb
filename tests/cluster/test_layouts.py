"""Every layout of a teacher gives what the plain forward gives: logits, and what every layer gets and gives.

Four families (Llama-shaped, GPT-2, BERT, ViT) x fp32 and bf16 (loaded with ``dtype=torch.bfloat16``) x

- pipelines of 1, 2 and 3 stages, each stage with its own weights;
- tensor parallel over 1 and 2 ranks; over 2 only Llama, for the others have no plan in transformers and are refused;
- sharded over 1 and 2 ranks, of rows that cannot be divided;
- 1 and 2 replicas, of one device and of a pipeline.

Text batches are ragged. Pipelines and shards do the same arithmetic, so they are held to the same bits. Tensor
parallelism sums up parts of each row, so it is held to ``TENSOR_PARALLEL``.

Starting a process costs more than all this, because it imports torch. So here four actors (:class:`Host`) are each
given the real ``TeacherWorker``, ``TeacherStage``, ``TeacherRank`` or ``TeacherLeader`` in turn; process groups, object
store and the handle are the real ones. What ``TeacherGroup.create`` does is tested in test_pipeline.py, test_ranks.py
and test_group.py, and at the end here. tests/teacher/test_stages.py has the pipelines of further families, in one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from silverspoon_ray import TeacherGroup, TeacherHandle, TeacherPlacement
from silverspoon_ray.cluster.layouts.pipeline import TeacherStage
from silverspoon_ray.cluster.layouts.ranks import TeacherLeader, TeacherRank
from silverspoon_ray.cluster.worker import TeacherSpec, TeacherWorker
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.source import known_structure
from silverspoon_ray.teacher.layout import check_layout
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.stages import plan_pipeline
from tests.support import Pad, bert_mlm, gpt2, llama, ragged_data, vit

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(3, 16, 4),
    "gpt2": lambda: gpt2(3, 16, 4),
    "bert": lambda: bert_mlm(3, 16, 4),
    "vit": lambda: vit(3, 16, 4),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp1": {},
    "pp2": {"num_devices": 2},
    "pp3": {"num_devices": 3},
    "tp1": {"strategy": "tp"},
    "tp2": {"strategy": "tp", "num_devices": 2},
    "sharded1": {"strategy": "sharded"},
    "sharded2": {"strategy": "sharded", "num_devices": 2},
    "two replicas": {"replicas": 2},
    "two replicas of pp2": {"num_devices": 2, "replicas": 2},
}
# Relative to the largest value. bf16 has steps of 2^-8, and two ranks round their sums before they are added.
TENSOR_PARALLEL = {"fp32": 1e-5, "bf16": 2**-5}
WITH_PLAN = ("llama",)
ROWS = 5


class Host:
    """A process that is each of a teacher's actors in turn."""

    worker: Any = None

    def become(self, kind: type, *arguments: Any) -> None:
        if isinstance(self.worker, TeacherRank):
            self.worker._leave()
        self.worker = kind(*arguments)


def handed_on(name: str) -> Callable[..., Any]:
    def method(self: Host, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.worker, name)(*arguments, **keywords)

    return method


for name in {name for kind in (TeacherStage, TeacherLeader) for name in dir(kind) if not name.startswith("_")}:
    setattr(Host, name, handed_on(name))


@pytest.fixture(scope="module")
def hosts(ray_cluster: Any) -> Iterator[list[Any]]:
    started = [ray.remote(Host).options(num_cpus=1).remote() for _ in range(4)]
    yield started
    for host in started:
        ray.kill(host)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in FAMILIES}
    for name, path in made.items():
        model = FAMILIES[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(8)  # as they are made, layers of this width hardly change what they get
        model.save_pretrained(path)
    return made


def batch_for(name: str) -> dict[str, Any]:
    if name == "vit":
        return {"pixel_values": torch.randn(ROWS, 1, 8, 8, generator=torch.Generator().manual_seed(1))}
    made = Pad("right" if name == "bert" else "left")(ragged_data(ROWS))
    assert not bool(made["attention_mask"].all())
    del made["labels"]
    return made


def asked(name: str, dtype: torch.dtype, path: Path) -> tuple[dict[str, Any], TeacherRequest, TeacherOutput]:
    """A batch, a request for everything, and the plain forward's answer."""
    model = type(FAMILIES[name]()).from_pretrained(path, dtype=dtype).eval()
    assert model.dtype == dtype
    layers = plan_pipeline(model, 1).layers
    assert len(layers) == 4
    request = TeacherRequest(outputs=layers, inputs=layers)
    batch = batch_for(name)
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].to(dtype)
    expected = LocalTeacher(model).answer(dict(batch), request)
    with torch.no_grad():
        assert torch.equal(expected.logits, model(**batch).logits)
    return batch, request, expected


def laid_out(hosts: list[Any], path: Path, dtype: torch.dtype, placement: TeacherPlacement) -> TeacherHandle:
    """What ``TeacherGroup.create`` does, with processes that are there already."""
    check_layout(known_structure(str(path)), placement)
    spec = TeacherSpec(
        source=str(path),
        module=None,
        load_kwargs={"dtype": dtype},
        device_type="cpu",
        threads=1,
        strategy=placement.strategy,
    )
    count, replicas, kinds = placement.num_devices, [], []
    for rank in range(placement.replicas):
        own = hosts[rank * count : (rank + 1) * count]
        assert len(own) == count
        replicas.append(own)
        for device, host in enumerate(own):
            if count == 1:
                kinds.append(host.become.remote(TeacherWorker, spec, rank))
            elif spec.strategy == "pp":
                kinds.append(host.become.remote(TeacherStage, spec, rank, device, count))
            elif device > 0:
                kinds.append(host.become.remote(TeacherRank, spec, rank, device, count))
            else:
                kinds.append(host.become.remote(TeacherLeader, spec, rank, count, own[1:]))
    ray.get(kinds, timeout=120)
    grouped = spec.strategy != "pp" and count > 1
    ray.get([host.ready.remote() for own in replicas for host in (own[:1] if grouped else own)], timeout=120)
    return TeacherHandle(replicas, 60, ray.get(hosts[0].plan.remote(), timeout=60))


def difference(one: Any, other: Any, tolerance: float) -> None:
    """0 means: the same bits."""
    if isinstance(other, tuple):
        pairs = zip(one, other, strict=True)
        for left, right in pairs:
            difference(left, right, tolerance)
    elif isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other) if tolerance == 0 else (one - other).abs().max() <= tolerance * other.abs().max()


def same_answers(answer: TeacherOutput, expected: TeacherOutput, tolerance: float) -> None:
    difference(answer.logits, expected.logits, tolerance)
    for kind in ("outputs", "inputs"):
        remote, here = getattr(answer, kind), getattr(expected, kind)
        assert remote.keys() == here.keys()
        assert len(here) == 4
        for name in here:
            difference(remote[name], here[name], tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_answers(name: str, layout: str, dtype: str, hosts: list[Any], directories: dict[str, Path]) -> None:
    placement = TeacherPlacement(**LAYOUTS[layout])
    if layout == "tp2" and name not in WITH_PLAN:
        with pytest.raises(ConfigError, match="no tensor-parallel plan"):
            check_layout(known_structure(str(directories[name])), placement)
        return
    batch, request, expected = asked(name, DTYPES[dtype], directories[name])
    handle = laid_out(hosts, directories[name], DTYPES[dtype], placement)
    tolerance = TENSOR_PARALLEL[dtype] if layout == "tp2" else 0.0
    for _ in range(placement.replicas):
        answer = handle.forward(batch, outputs=request.outputs, inputs=request.inputs)
        same_answers(answer, expected, tolerance)
    assert [stats["forwards"] for stats in handle.stats()] == [1] * placement.num_devices * placement.replicas


@pytest.mark.parametrize("name", ["vit"])
def test_a_group(name: str, directories: dict[str, Path]) -> None:
    """The same through ``TeacherGroup.create``, which gets the loading keyword."""
    batch, request, expected = asked(name, torch.bfloat16, directories[name])
    placement = TeacherPlacement(num_devices=2, replicas=2)
    with TeacherGroup.create(str(directories[name]), placement, dtype=torch.bfloat16) as group:
        for _ in range(2):
            answer = group.handle.forward(batch, outputs=request.outputs, inputs=request.inputs)
            same_answers(answer, expected, 0.0)
        assert [stats["forwards"] for stats in group.stats()] == [1] * 4
