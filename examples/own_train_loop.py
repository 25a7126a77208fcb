"""A Ray Train loop of your own with a shared teacher."""

from __future__ import annotations

from typing import Any

import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from tiny import make_data, make_student, make_teacher

from silverspoon_ray import ResponseBasedDistiller, TeacherGroup, TeacherPlacement, TrainingArguments


def loop(config: dict[str, Any]) -> dict[str, float]:
    distiller = ResponseBasedDistiller(
        student_model=make_student(),
        teacher_model=config["teacher"],  # the group's handle: picklable, and accepted wherever a teacher is
        train_dataset=make_data(),
        args=TrainingArguments(output_dir="trainer_output", max_steps=10, save_strategy="no", disable_tqdm=True),
    )
    return {"train_loss": distiller.train().training_loss, "rank": ray.train.get_context().get_world_rank()}


with TeacherGroup.create(make_teacher, TeacherPlacement(replicas=1)) as group:
    answer = group.handle.forward({"input_ids": make_data(1)[0]["input_ids"][None]}, outputs=["model.layers.1"])
    print("logits", tuple(answer.logits.shape), "layer 1", tuple(answer.outputs["model.layers.1"].shape))
    result = TorchTrainer(
        loop, train_loop_config={"teacher": group.handle}, scaling_config=ScalingConfig(num_workers=1)
    ).fit()
    print(result.return_value)
    print(group.stats())
