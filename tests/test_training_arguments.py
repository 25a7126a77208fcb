"""TrainingArguments: the contract's defaults, all of transformers' fields, travelling by keyword, and its errors."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import transformers

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.teacher.placement import TeacherPlacement
from silverspoon_ray.training_arguments import TrainingArguments, training_arguments_from

OURS = {
    "alpha": 0.0,
    "magnitude_aware_weighting": False,
    "teacher_placement": None,
    "overlap_teacher_forward": None,
    "backward_per_block": False,
    "clip_projectors": True,
    "deepcopy_captured_args_and_kwargs": False,
    "auto_device_match": False,
    "auto_dtype_match": False,
    "e2e_eval_loss": None,
    "count_flops": False,
    "enable_profiling": False,
    "profiling_output_dir": None,
    "profiling_wait": 20,
    "profiling_warmup": 3,
    "profiling_active": 3,
    "profiling_repeat": 1,
    "profiling_with_stack": False,
    "use_weightwatcher": False,
    "teacher_prefetch": 2,
    "teacher_logits": "full",
    "teacher_top_k": 64,
    "teacher_wire_dtype": None,
    "teacher_transport": "auto",
    "teacher_cache": None,
    "distill_mask": "auto",
}
PARENT = {f.name: f for f in dataclasses.fields(transformers.TrainingArguments)}


def test_fields_and_defaults() -> None:
    fields = {f.name: f for f in dataclasses.fields(TrainingArguments)}
    assert fields.keys() == PARENT.keys() | OURS.keys()
    assert {name: fields[name].default for name in OURS} == OURS
    assert all(fields[name].metadata.get("help") for name in OURS), "every keyword is explained"
    args = TrainingArguments(use_cpu=True)
    assert {name: getattr(args, name) for name in OURS} == OURS
    assert args.report_to == []


def test_the_references_keywords_and_defaults() -> None:
    """Those of silverspoon-kd are all there, with its defaults."""
    kd = pytest.importorskip("silverspoon_kd")
    theirs = {f.name: f for f in dataclasses.fields(kd.TrainingArguments) if f.name not in PARENT}
    mine = {f.name: f for f in dataclasses.fields(TrainingArguments)}
    assert theirs.keys() <= mine.keys()
    for name, field in theirs.items():
        assert mine[name].default == field.default, name


def parent_values() -> list[Any]:
    """For every field of transformers a value that is not its default, with what it needs beside it."""
    special = {
        "output_dir": ("elsewhere", {}),
        "accelerator_config": ({"split_batches": True, "even_batches": False}, {}),
        "fsdp": (None, {}),
        "deepspeed": (None, {}),
        "debug": ("underflow_overflow", {}),
        "optim": ("sgd", {}),
        "optim_args": ("a=1", {}),
        "optim_target_modules": (["q_proj"], {}),
        "lr_scheduler_type": ("cosine", {}),
        "lr_scheduler_kwargs": ({"num_cycles": 2}, {}),
        "eval_strategy": ("epoch", {}),
        "save_strategy": ("no", {}),
        "logging_strategy": ("epoch", {}),
        "hub_strategy": ("checkpoint", {}),
        "report_to": ("none", {}),
        "load_best_model_at_end": (True, {"eval_strategy": "steps", "eval_steps": 10, "save_steps": 10}),
        "metric_for_best_model": ("eval_loss", {}),
        "greater_is_better": (True, {}),
        "eval_steps": (7, {}),
        "eval_delay": (2, {}),
        "log_level": ("error", {}),
        "log_level_replica": ("error", {}),
        "bf16": (True, {}),
        "fp16": (None, {}),
        "tf32": (None, {}),
        "use_cpu": (True, {}),
        "ddp_backend": (None, {}),
        "ddp_find_unused_parameters": (False, {}),
        "ddp_broadcast_buffers": (True, {}),
        "ddp_static_graph": (True, {}),
        "gradient_checkpointing": (True, {}),
        "include_num_input_tokens_seen": ("all", {}),
        "disable_tqdm": (True, {}),
        "eval_accumulation_steps": (2, {}),
        "hub_private_repo": (True, {}),
        "hub_revision": ("branch", {}),
        "length_column_name": ("size", {}),
        "dataloader_multiprocessing_context": ("spawn", {"dataloader_num_workers": 1}),
        "fsdp_config": ({"min_num_params": 0}, {}),
        "ddp_bucket_cap_mb": (25, {}),
        "ddp_timeout": (60, {}),
        "label_names": (["labels", "extra"], {}),
        "include_for_metrics": (["inputs"], {}),
        "gradient_checkpointing_kwargs": ({"use_reentrant": False}, {}),
        "torch_compile": (None, {}),
        "torch_compile_backend": (None, {}),
        "torch_compile_mode": (None, {}),
        "parallelism_config": (None, {}),
        "dataloader_prefetch_factor": (3, {"dataloader_num_workers": 2}),
        "train_sampling_strategy": ("sequential", {}),
        "data_seed": (5, {}),
        "liger_kernel_config": ({"rope": True}, {}),
        "neftune_noise_alpha": (0.1, {}),
        "torch_empty_cache_steps": (4, {}),
        "save_total_limit": (2, {}),
        "resume_from_checkpoint": ("checkpoint-1", {}),
        "run_name": ("a run", {}),
        "push_to_hub": (None, {}),
        "hub_model_id": ("someone/something", {}),
        "hub_token": ("token", {}),
        "project": ("a project", {}),
        "trackio_space_id": ("space", {}),
        "warmup_steps": (3, {}),
        "local_rank": (None, {}),
    }
    cases = []
    for name, field in PARENT.items():
        if not field.init:
            continue
        if name in special:
            value, others = special[name]
        elif isinstance(field.default, bool):
            value, others = not field.default, {}
        elif isinstance(field.default, int | float):
            value, others = field.default + 1, {}
        else:
            value, others = None, {}
        if value is not None:
            cases.append(pytest.param(name, value, others, id=name))
    return cases


@pytest.mark.parametrize(("name", "value", "others"), parent_values())
def test_fields_of_transformers(name: str, value: Any, others: dict[str, Any]) -> None:
    """Accepted as by the parent, and the same after travelling."""
    keywords = {"use_cpu": True, name: value, **others}
    parent = transformers.TrainingArguments(**{"report_to": "none", **keywords})
    args = TrainingArguments(**keywords)
    assert getattr(args, name) == getattr(parent, name)
    assert args.keywords().get(name, PARENT[name].default) == value
    for again in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args), TrainingArguments(**args.keywords())):
        assert type(again) is TrainingArguments
        for field in PARENT:
            assert str(getattr(again, field)) == str(getattr(args, field)), field


OWN_VALUES: list[tuple[str, Any]] = [
    ("alpha", 0.25),
    ("alpha", 1),
    ("magnitude_aware_weighting", True),
    ("teacher_placement", "replicated"),
    ("teacher_placement", TeacherPlacement(replicas=2)),
    ("overlap_teacher_forward", True),
    ("overlap_teacher_forward", False),
    ("auto_device_match", True),
    ("auto_dtype_match", True),
    ("e2e_eval_loss", "forward"),
    ("count_flops", True),
    ("enable_profiling", True),
    ("profiling_output_dir", "traces"),
    ("profiling_wait", 0),
    ("profiling_warmup", 0),
    ("profiling_active", 1),
    ("profiling_repeat", 0),
    ("profiling_with_stack", True),
    ("teacher_prefetch", 0),
    ("teacher_prefetch", 9),
    ("teacher_wire_dtype", "bfloat16"),
    ("teacher_transport", "object_store"),
    ("teacher_transport", "collective"),
    ("distill_mask", "labels"),
    ("distill_mask", "attention"),
    ("distill_mask", "none"),
]


@pytest.mark.parametrize(("name", "value"), OWN_VALUES, ids=[f"{name}={value}" for name, value in OWN_VALUES])
def test_own_keywords_travel(name: str, value: Any) -> None:
    args = TrainingArguments(use_cpu=True, **{name: value})
    assert args.keywords() == {"use_cpu": True, name: value}
    for again in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args)):
        assert getattr(again, name) == getattr(args, name) == value


def test_placement_as_a_mapping() -> None:
    args = TrainingArguments(use_cpu=True, teacher_placement={"replicas": 2})
    assert args.teacher_placement == TeacherPlacement(replicas=2)
    assert pickle.loads(pickle.dumps(args)).teacher_placement == TeacherPlacement(replicas=2)


def test_wire_dtype_as_torch_writes_it() -> None:
    torch = pytest.importorskip("torch")
    args = TrainingArguments(use_cpu=True, teacher_wire_dtype=torch.float16)
    assert args.teacher_wire_dtype == "float16"
    assert pickle.loads(pickle.dumps(args)).teacher_wire_dtype == "float16"


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", 0.75), ("learning_rate", 0.5), ("max_steps", 7), ("output_dir", "later"), ("teacher_prefetch", 0)],
)
def test_later_assignments_survive(name: str, value: Any) -> None:
    args = TrainingArguments(use_cpu=True, alpha=0.5, seed=3)
    setattr(args, name, value)
    assert args.keywords()[name] == value
    for again in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args), copy.deepcopy(copy.deepcopy(args))):
        assert getattr(again, name) == value
        assert again.seed == 3


def test_a_default_that_is_assigned_later_survives() -> None:
    args = TrainingArguments(use_cpu=True, alpha=0.5)
    args.alpha = 0.0
    assert pickle.loads(pickle.dumps(args)).alpha == 0.0


def test_no_state_of_this_machine_travels(tmp_path: Path) -> None:
    """Devices and process state are found anew where an instance arrives; what travels is keywords."""
    args = TrainingArguments(use_cpu=True, output_dir=str(tmp_path))
    assert args.device.type == "cpu"  # from here on transformers keeps the device
    rebuild, (cls, keywords) = args.__reduce__()
    assert cls is TrainingArguments
    assert keywords == {"use_cpu": True, "output_dir": str(tmp_path)}
    assert rebuild(cls, keywords).alpha == 0.0
    assert len(pickle.dumps(args)) < 400


# ---- errors ------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any]] = [
    ("alpha", -0.1),
    ("alpha", 1.5),
    ("alpha", "0.5"),
    ("alpha", True),
    ("alpha", None),
    ("alpha", float("nan")),
    ("teacher_placement", "dedicated"),
    ("teacher_placement", 3),
    ("overlap_teacher_forward", "yes"),
    ("e2e_eval_loss", "backward"),
    ("e2e_eval_loss", True),
    ("profiling_wait", -1),
    ("profiling_warmup", 0.5),
    ("profiling_active", 0),
    ("profiling_repeat", True),
    ("teacher_prefetch", -1),
    ("teacher_prefetch", 1.5),
    ("teacher_prefetch", None),
    ("teacher_logits", "all"),
    ("teacher_logits", None),
    ("teacher_top_k", 0),
    ("teacher_wire_dtype", "int8"),
    ("teacher_wire_dtype", 16),
    ("teacher_transport", "nccl"),
    ("distill_mask", "label"),
    ("distill_mask", None),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{name}={value!r}" for name, value in REFUSED])
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainingArguments(use_cpu=True, **{name: value})
    assert isinstance(refused.value, ValueError)
    assert refused.value.key == name
    assert str(refused.value).startswith(f"{name}={value!r}: ")


def test_errors_of_a_placement_name_its_keyword() -> None:
    with pytest.raises(ConfigError, match=r"teacher_placement\.replicas=0: "):
        TrainingArguments(use_cpu=True, teacher_placement={"replicas": 0})
    with pytest.raises(ConfigError, match=r"teacher_placement\.devices=1: "):
        TrainingArguments(use_cpu=True, teacher_placement={"devices": 1})


def test_teacher_cache(tmp_path: Path) -> None:
    """A path becomes text, as it travels; a URI stays what it is."""
    assert TrainingArguments(use_cpu=True, teacher_cache=tmp_path).teacher_cache == str(tmp_path)
    assert TrainingArguments(use_cpu=True, teacher_cache="s3://bucket/a").teacher_cache == "s3://bucket/a"
    for value in ("", 3, True):
        with pytest.raises(ConfigError, match="a directory, or a URI") as refused:
            TrainingArguments(use_cpu=True, teacher_cache=value)
        assert refused.value.key == "teacher_cache"


# ---- from a mapping ----------------------------------------------------------------------------------------


def test_from_a_mapping() -> None:
    args = training_arguments_from({"alpha": 0.5, "use_cpu": True})
    assert args.alpha == 0.5
    assert training_arguments_from(args) is args
    assert training_arguments_from(None).alpha == 0.0


@pytest.mark.parametrize(
    ("given", "near"), [("alhpa", "alpha"), ("learning_rat", "learning_rate"), ("teacher_prefech", "teacher_prefetch")]
)
def test_misspelt_keyword(given: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean.*\b{near}\b") as refused:
        training_arguments_from({given: 0.5})
    assert refused.value.key == given


def test_what_transformers_refuses() -> None:
    with pytest.raises(ConfigError, match="transformers refuses it"):
        training_arguments_from({"use_cpu": True, "eval_strategy": "sometimes"})


def test_the_parents_instance_is_refused() -> None:
    with pytest.raises(ConfigError, match="silverspoon_ray"):
        training_arguments_from(transformers.TrainingArguments(use_cpu=True, report_to="none"))  # type: ignore[arg-type]
