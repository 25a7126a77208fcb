"""TeacherPlacement: its defaults, and errors that name the keyword and quote the value."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from silverspoon_ray.errors import ConfigError, NotYetError, SilverspoonError
from silverspoon_ray.teacher.placement import TeacherPlacement

DEFAULTS = {
    "strategy": "pp",
    "num_devices": 1,
    "replicas": 1,
    "teacher_only_devices": None,
    "wrap_cls": None,
    "device_type": None,
    "resources_per_device": None,
    "accelerator_type": None,
    "placement_strategy": "PACK",
    "startup_timeout_s": 600,
}


def test_fields_and_defaults() -> None:
    assert {f.name: f.default for f in dataclasses.fields(TeacherPlacement)} == DEFAULTS
    assert dataclasses.asdict(TeacherPlacement()) == DEFAULTS


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TeacherPlacement().replicas = 2  # type: ignore[misc]


ACCEPTED: list[dict[str, Any]] = [
    {"replicas": 4},
    {"teacher_only_devices": [3]},
    {"teacher_only_devices": (0,), "num_devices": 1},
    {"device_type": "cpu"},
    {"device_type": "cuda", "accelerator_type": "H100"},
    {"resources_per_device": {"teacher_node": 0.5, "memory": 2}},
    {"placement_strategy": "STRICT_SPREAD"},
    {"startup_timeout_s": 0.5},
]


@pytest.mark.parametrize("keywords", ACCEPTED, ids=str)
def test_accepted(keywords: dict[str, Any]) -> None:
    placement = TeacherPlacement(**keywords)
    for name, value in keywords.items():
        assert getattr(placement, name) == value
    assert placement.num_devices == 1
    assert TeacherPlacement.from_value(keywords) == placement
    assert TeacherPlacement.from_value(placement) is placement
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert copy.deepcopy(placement) == placement


REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    ("strategy", "dp", {}),
    ("strategy", None, {}),
    ("num_devices", 0, {}),
    ("num_devices", -1, {}),
    ("num_devices", 1.0, {}),
    ("num_devices", True, {}),
    ("num_devices", "2", {}),
    ("num_devices", 3, {"teacher_only_devices": [0, 1]}),
    ("replicas", 0, {}),
    ("replicas", 2.5, {}),
    ("replicas", True, {}),
    ("teacher_only_devices", [], {}),
    ("teacher_only_devices", "01", {}),
    ("teacher_only_devices", 2, {}),
    ("wrap_cls", "LlamaDecoderLayer", {}),
    ("wrap_cls", ["A"], {"strategy": "pp"}),
    ("wrap_cls", 3, {"strategy": "sharded"}),
    ("wrap_cls", [], {"strategy": "sharded"}),
    ("wrap_cls", ["A", 3], {"strategy": "sharded"}),
    ("accelerator_type", "", {}),
    ("accelerator_type", 100, {}),
    ("resources_per_device", "teacher", {}),
    ("device_type", "tpu", {}),
    ("device_type", "CUDA", {}),
    ("placement_strategy", "pack", {}),
    ("placement_strategy", "NEAR", {}),
    ("startup_timeout_s", 0, {}),
    ("startup_timeout_s", -5, {}),
    ("startup_timeout_s", float("inf"), {}),
    ("startup_timeout_s", float("nan"), {}),
    ("startup_timeout_s", "600", {}),
    ("startup_timeout_s", True, {}),
]


@pytest.mark.parametrize(("name", "value", "others"), REFUSED, ids=[f"{n}={v!r}" for n, v, _ in REFUSED])
def test_refused(name: str, value: Any, others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        TeacherPlacement(**{name: value, **others})
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, SilverspoonError)
    assert not isinstance(refused.value, NotYetError)
    assert refused.value.key == f"teacher_placement.{name}"
    assert str(refused.value).startswith(f"teacher_placement.{name}={value!r}: ")
    assert pickle.loads(pickle.dumps(refused.value)).args == refused.value.args or value != value


@pytest.mark.parametrize("amount", [0, -1, "1", True, None, float("inf")])
def test_refused_resources(amount: Any) -> None:
    with pytest.raises(ConfigError, match=r"teacher_placement\.resources_per_device\.memory=") as refused:
        TeacherPlacement(resources_per_device={"CPU": 1, "memory": amount})
    assert refused.value.value == amount


@pytest.mark.parametrize(
    "keywords",
    [
        {"strategy": "tp", "num_devices": 2},
        {"strategy": "sharded", "num_devices": 2, "wrap_cls": "LlamaDecoderLayer"},
        {"num_devices": 3, "replicas": 2},
        {"teacher_only_devices": [0, 1, 2]},
    ],
    ids=str,
)
def test_layouts(keywords: dict[str, Any]) -> None:
    placement = TeacherPlacement(**keywords)
    assert placement.num_devices == len(keywords.get("teacher_only_devices", "x" * keywords.get("num_devices", 0)))
    assert TeacherPlacement.from_value(keywords) == placement


@pytest.mark.parametrize("value", ["pp", 3, [1], None])
def test_from_something_else(value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        TeacherPlacement.from_value(value)
    assert refused.value.key == "teacher_placement"
    assert refused.value.value == value


def test_unknown_keyword() -> None:
    with pytest.raises(ConfigError, match="num_devices") as refused:
        TeacherPlacement.from_value({"devices": 2})
    assert refused.value.key == "teacher_placement.devices"
    assert refused.value.value == 2
