"""What users get wrong about a teacher's layout: one typed error that says what would be right, at once.

Nothing is reserved, and no process is started for it. What the command line makes of mistakes is in
tests/cli/test_mistakes.py, values out of their range one by one in tests/teacher/test_placement.py, models that only
show in a forward that they cannot be cut in test_pipeline.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.train import ScalingConfig

from silverspoon_ray import DistillationTrainer, TeacherGroup, TeacherPlacement
from silverspoon_ray.cluster.handle import TeacherHandle
from silverspoon_ray.errors import ConfigError, PlacementError
from tests.cluster.test_group import nothing_left, reserved
from tests.support import Pad, bert_mlm, gpt2, llama, ragged_data, t5, vit

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

LIMIT_S = 4.0
"""An actor of a teacher needs more than that to start: it imports torch and transformers."""

TWO = partial(llama, 2, 32, 2)
THREE = partial(llama, 2, 32, 3)
PLACEMENT = "teacher_placement."


@contextmanager
def at_once() -> Iterator[None]:
    """Nothing is reserved, also not for a moment, and it does not take long."""
    before = set(ray.util.placement_group_table())  # those that were given back stay in it
    actors = len(ray._private.state.actors())
    begin = time.monotonic()
    yield
    seconds = time.monotonic() - begin
    assert set(ray.util.placement_group_table()) == before
    assert len(ray._private.state.actors()) == actors
    nothing_left(reserved())
    # On a machine that others load as well, a process gets its share only.
    assert seconds < LIMIT_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.fixture(autouse=True, scope="module")
def imported(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first of everything takes longer: it imports."""
    path = tmp_path_factory.mktemp("first")
    TWO().save_pretrained(path)
    with pytest.raises(ConfigError):
        TeacherGroup.create(str(path), TeacherPlacement(num_devices=3))


# What is loaded; the placement; the key and the value that the error names; what it says would be right.
LAYOUTS: dict[str, tuple[Callable[[], Any], dict[str, Any], str, Any, str]] = {
    "3 stages of 2 layers": (TWO, {"num_devices": 3}, "num_devices", 3, "at most 2, the number of layers"),
    "the replicas' stages": (TWO, {"num_devices": 3, "replicas": 2}, "num_devices", 3, "at most 2"),
    "a pipeline of no stack": (
        partial(torch.nn.Linear, 2, 2),
        {"num_devices": 2},
        "num_devices",
        2,
        "1; Linear has no",
    ),
    "a pipeline of T5": (partial(t5, 0, 16, 3), {"num_devices": 2}, "num_devices", 2, "1 for T5ForConditional"),
    "tp of GPT-2": (
        partial(gpt2, 1, 16, 2),
        {"strategy": "tp", "num_devices": 2},
        "strategy",
        "tp",
        '"pp" or "sharded"',
    ),
    "tp of BERT": (
        partial(bert_mlm, 1, 16, 2),
        {"strategy": "tp", "num_devices": 2},
        "strategy",
        "tp",
        '"pp" or "shard',
    ),
    "tp of ViT": (partial(vit, 1, 16, 2), {"strategy": "tp", "num_devices": 2}, "strategy", "tp", '"pp" or "sharded"'),
    "tp and heads": (THREE, {"strategy": "tp", "num_devices": 3}, "num_devices", 3, "divides num_attention_heads=4"),
    "tp and key heads": (
        THREE,
        {"strategy": "tp", "num_devices": 4},
        "num_devices",
        4,
        "divides num_key_value_heads=2",
    ),
    "wrap_cls of no module": (
        THREE,
        {"strategy": "sharded", "num_devices": 2, "wrap_cls": "LlamaLayer"},
        "wrap_cls",
        "LlamaLayer",
        "LlamaDecoderLayer",
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case: str, tmp_path: Path) -> None:
    """Of a directory, as far as its class can be saved; of a module otherwise."""
    make, keywords, key, value, said = LAYOUTS[case]
    model = make()
    teacher = model
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(tmp_path)
        teacher = str(tmp_path)
    with at_once(), pytest.raises(ConfigError) as refused:
        TeacherGroup.create(teacher, TeacherPlacement(**keywords))
    assert (refused.value.key, refused.value.value) == (PLACEMENT + key, value)
    assert said in refused.value.expected


VALUES: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"strategy": "fsdp"}, "strategy", "fsdp", "'pp', 'tp', 'sharded'"),
    ({"strategy": "pp", "num_devices": 2, "wrap_cls": "Block"}, "wrap_cls", "Block", 'unless strategy="sharded"'),
    ({"num_devices": 0}, "num_devices", 0, "1 or more"),
    ({"num_devices": -2}, "num_devices", -2, "1 or more"),
    ({"num_devices": True}, "num_devices", True, "a whole number"),
    ({"replicas": 0}, "replicas", 0, "1 or more"),
    ({"replicas": False}, "replicas", False, "a whole number"),
    ({"startup_timeout_s": -1}, "startup_timeout_s", -1, "more than 0"),
    ({"resources_per_device": {"node": True}}, "resources_per_device.node", True, "above 0"),
    ({"placement_strategy": "SPREAD_STRICT"}, "placement_strategy", "SPREAD_STRICT", "'STRICT_SPREAD'"),
    ({"n_devices": 2}, "n_devices", 2, "num_devices"),
]


@pytest.mark.parametrize(("keywords", "key", "value", "said"), VALUES, ids=[str(case[0]) for case in VALUES])
def test_values(keywords: dict[str, Any], key: str, value: Any, said: str) -> None:
    """Given to ``create`` as a mapping, and in training arguments."""
    with at_once():
        with pytest.raises(ConfigError) as refused:
            TeacherGroup.create(TWO, keywords)
        assert (refused.value.key, refused.value.value) == (PLACEMENT + key, value)
        assert said in refused.value.expected
        with pytest.raises(ConfigError, match=said):
            trainer(Path("out"), args={"teacher_placement": keywords})


# The placement; what the error says; the resource in its numbers, and how much of it is needed.
RESOURCES: dict[str, tuple[dict[str, Any], str, str, float]] = {
    "devices": ({"num_devices": 40}, r"num_devices=40, replicas=1.*ray\.init\(num_cpus=40\)", "CPU", 40),
    "replicas": ({"num_devices": 2, "replicas": 30}, r"num_devices=2, replicas=30.*num_cpus=60", "CPU", 60),
    "GPUs": ({"device_type": "cuda"}, r"no GPUs; device_type='cpu'", "GPU", 1),
    "accelerator": ({"accelerator_type": "H100"}, r"accelerator_type='H100': None", "accelerator_type:H100", 0.001),
    "resource": ({"resources_per_device": {"unicorn": 2}}, r"unicorn=2: no node has it, known are CPU", "unicorn", 2),
    "spread": (
        {"num_devices": 2, "placement_strategy": "STRICT_SPREAD"},
        r"placement_strategy='STRICT_SPREAD': 2 devices on 2 nodes, and 1 of 1 could take one; 'SPREAD' or 'PACK'",
        "CPU",
        2,
    ),
}


@pytest.mark.parametrize("case", RESOURCES)
def test_resources(case: str, tmp_path: Path) -> None:
    """What this Ray will never have: no use waiting, though there are ten minutes to wait."""
    keywords, said, name, needed = RESOURCES[case]
    llama(2, 16, 40).save_pretrained(tmp_path)
    placement = TeacherPlacement(**keywords)
    assert placement.startup_timeout_s == 600
    with at_once(), pytest.raises(PlacementError, match=said) as refused:
        TeacherGroup.create(str(tmp_path), placement)
    assert refused.value.needed[name] == pytest.approx(needed)
    assert name in refused.value.total
    assert name in str(refused.value)


def trainer(path: Path, **keywords: Any) -> DistillationTrainer:
    arguments = {"output_dir": str(path), "max_steps": 1, **keywords.pop("args", {})}
    settings = {"teacher": TWO, "student": partial(gpt2, 1), "train_dataset": ragged_data(8), "data_collator": Pad()}
    return DistillationTrainer("response_based", args=arguments, **{**settings, **keywords})


def test_teacher_and_students_together(tmp_path: Path) -> None:
    """Each would fit alone."""
    slots = int(ray.cluster_resources()["CPU"])
    made = trainer(
        tmp_path,
        args={"teacher_placement": {"num_devices": 2, "replicas": slots // 2}},
        scaling_config=ScalingConfig(num_workers=slots),
    )
    with at_once(), pytest.raises(PlacementError, match=f"the teacher and {slots} student worker") as refused:
        made.fit()
    assert refused.value.needed["CPU"] == 2 * slots
    assert f"ray.init(num_cpus={2 * slots})" in str(refused.value)


def test_students_on_nodes_that_are_not_there(tmp_path: Path) -> None:
    """Said before the teacher is started."""
    made = trainer(
        tmp_path,
        args={"teacher_placement": {}},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
    )
    with at_once(), pytest.raises(PlacementError, match=r"2 student worker.*'STRICT_SPREAD'"):
        made.fit()


@pytest.mark.parametrize("placement", ["sharded", "replicated", {"num_devices": 2}])
def test_a_placement_for_a_teacher_that_is_there(placement: Any, tmp_path: Path) -> None:
    handle = TeacherHandle([[object()]], 1.0)
    handle._structure = llama(2).to("meta")
    with at_once(), pytest.raises(ConfigError, match="None for the handle of a TeacherGroup") as refused:
        trainer(tmp_path, teacher=handle, args={"teacher_placement": placement})
    assert refused.value.key == "args.teacher_placement"


def test_keywords_in_the_wrong_place(tmp_path: Path) -> None:
    """Both would be ignored, or fail in a process on another machine."""
    TWO().save_pretrained(tmp_path)
    with at_once():
        with pytest.raises(ConfigError, match=r"num_devices=2: .*TeacherPlacement\(num_devices=2\)"):
            TeacherGroup.create(str(tmp_path), num_devices=2)
        with pytest.raises(ConfigError, match=r"dtype=.*only a teacher that is a directory or hub id"):
            TeacherGroup.create(TWO, dtype=torch.bfloat16)


def test_tensor_parallel_of_a_callable() -> None:
    with at_once(), pytest.raises(ConfigError, match="tp loads a directory or hub id") as refused:
        TeacherGroup.create(TWO, TeacherPlacement(strategy="tp", num_devices=2))
    assert refused.value.key == PLACEMENT + "strategy"
