"""The same job on Ray: the teacher as an actor on devices of its own, the student under Ray Train."""

from __future__ import annotations

import tempfile

from ray.train import RunConfig, ScalingConfig
from tiny import make_data, make_student, make_teacher

from silverspoon_ray import DistillationTrainer, TeacherPlacement, TrainingArguments

trainer = DistillationTrainer(
    "response_based",
    teacher=make_teacher,  # built in the teacher's actor; a model directory or hub id works as well
    student=make_student,
    args=TrainingArguments(
        output_dir="trainer_output",
        max_steps=20,
        logging_steps=5,
        save_steps=10,
        alpha=0.3,
        learning_rate=1e-3,
        teacher_placement=TeacherPlacement(replicas=1),
    ),
    train_dataset=make_data,
    eval_dataset=make_data,
    distiller_kwargs={"soft_loss_fn": "jsd", "soft_loss_fn_kwargs": {"beta": 0.5}},
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(name="example", storage_path=tempfile.mkdtemp()),
)
result = trainer.fit()
print(result.metrics_dataframe[["step", "loss", "loss/soft", "teacher/wait_fraction"]])
print("a from_pretrained directory:", result.checkpoint.path + "/checkpoint")
