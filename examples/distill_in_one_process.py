"""Response-based distillation in one process, as with silverspoon-kd: only the import differs."""

from __future__ import annotations

from tiny import make_data, make_student, make_teacher

from silverspoon_ray import ResponseBasedDistiller, TrainingArguments

distiller = ResponseBasedDistiller(
    student_model=make_student(),
    teacher_model=make_teacher(),
    train_dataset=make_data(),
    eval_dataset=make_data(16),
    args=TrainingArguments(
        output_dir="trainer_output", max_steps=20, logging_steps=5, save_strategy="no", alpha=0.3, learning_rate=1e-3
    ),
    soft_loss_fn="kl_divergence",
    soft_loss_fn_kwargs={"temperature": 2.0},
)
distiller.train()
print(distiller.evaluate())
