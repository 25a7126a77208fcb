"""torch.compile of a dedicated teacher, on a real Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from silverspoon_ray import DistillationTrainer, TeacherGroup, TeacherPlacement
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherRequest
from tests.cluster.test_group import nothing_left, reserved
from tests.support import Pad, gpt2, llama, ragged_data

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

TEACHER = partial(llama, 2, 32, 3)
LAYERS = tuple(f"model.layers.{number}" for number in range(3))
INNER = "model.layers.1.mlp.up_proj"
COMPILE = {"backend": "aot_eager"}


def batch(rows: int, seed: int = 1) -> dict[str, Any]:
    made = Pad()(ragged_data(rows, seed=seed))
    del made["labels"]
    return made


@pytest.mark.parametrize("strategy", ["pp", "sharded", "tp"])
def test_answers(strategy: str, tmp_path: Path) -> None:
    """Every process compiles, of a tensor-parallel teacher none; what is captured and given is the same."""
    TEACHER().save_pretrained(tmp_path)
    local = LocalTeacher(TEACHER().eval())
    placement = TeacherPlacement(strategy=strategy, num_devices=2)
    with TeacherGroup.create(str(tmp_path), placement, torch_compile=COMPILE) as group:
        assert [stats["compiled_graphs"] for stats in group.stats()] == [0, 0]  # also behind the pipeline's example
        for request in ({"outputs": LAYERS, "inputs": LAYERS}, {"outputs": (INNER,)}, {}):
            for rows in (5, 3):
                answer = group.handle.forward(batch(rows, seed=rows), **request)
                expected = local.answer(batch(rows, seed=rows), TeacherRequest(**request))
                torch.testing.assert_close(answer.logits, expected.logits, rtol=1e-5, atol=1e-5)
                for kind in ("outputs", "inputs"):
                    got, wanted = getattr(answer, kind), getattr(expected, kind)
                    assert got.keys() == wanted.keys()
                    for name in wanted:
                        torch.testing.assert_close(got[name], wanted[name], rtol=1e-5, atol=1e-5)
        graphs = [stats["compiled_graphs"] for stats in group.stats()]
    assert graphs == [0, 0] if strategy == "tp" else min(graphs) >= 1


def fit(tmp_path: Path, **arguments: Any) -> tuple[list[float], list[dict[str, Any]]]:
    trainer = DistillationTrainer(
        "response_based",
        teacher=str(tmp_path / "teacher"),
        student=partial(gpt2, 1),
        args={
            "output_dir": str(tmp_path / "runs"),
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "save_strategy": "no",
            "teacher_placement": {"num_devices": 1},
            **arguments,
        },
        train_dataset=ragged_data(16),
        data_collator=Pad(),
    )
    history = trainer.fit().metrics_dataframe
    assert trainer.teacher_stats is not None
    return [float(loss) for loss in history["loss"].dropna()], trainer.teacher_stats


def test_training_compiles_student_and_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # transformers' arguments set it, for good
    TEACHER().save_pretrained(tmp_path / "teacher")
    plain, stats = fit(tmp_path)
    assert "compiled_graphs" not in stats[0]
    losses, stats = fit(tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    assert stats[0]["compiled_graphs"] >= 1
    assert len(losses) == 4
    assert losses == pytest.approx(plain, rel=1e-4)


def test_settings_are_checked_before_anything_is_reserved() -> None:
    before = reserved()
    with pytest.raises(ConfigError, match=r"torch_compile\.backend='inductr'"):
        TeacherGroup.create(TEACHER, torch_compile={"backend": "inductr"})
    assert reserved() <= before
    nothing_left(before)


def test_settings_are_no_keywords_of_the_model(tmp_path: Path) -> None:
    """``from_pretrained`` would take any keyword, and ignore it."""
    seen: list[dict[str, Any]] = []
    TEACHER().save_pretrained(tmp_path)

    from silverspoon_ray.cluster.worker import TeacherSpec, TeacherWorker

    spec = TeacherSpec(str(tmp_path), None, {"dtype": torch.bfloat16}, "cpu", 1, torch_compile=COMPILE)
    worker = TeacherWorker(spec, 0)
    original = transformers.LlamaForCausalLM.from_pretrained

    def noting(*arguments: Any, **keywords: Any) -> Any:
        seen.append(keywords)
        return original(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transformers.LlamaForCausalLM, "from_pretrained", noting)
        teacher = worker._loaded()
    assert seen == [{"dtype": torch.bfloat16}]
    assert teacher.compiled is not None
    assert tuple(teacher.compiled.layers) == LAYERS
