"""What a teacher is worth when labels are few: handwritten digits, a convolutional teacher, a smaller student.

The data are scikit-learn's digits, 1797 real images of 8x8 pixels (``pip install scikit-learn``). The teacher learns
from all 1197 training labels. The student is given the labels of 100 training images, and learns

- alone: from those labels;
- response-based: from those labels, and from the teacher's logits on all training images (Hinton et al. 2015);
- feature-based: from those labels, and from the teacher's maps after each stage, through 1x1 projectors (FitNets).

All three take the same number of steps of 64 images. Each is run with three seeds, which choose the 100 images, the
first weights and the order of the data. One run is repeated on Ray, with the teacher in a process of its own.

    python examples/digits.py [--output-dir digits] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
import transformers
from pictures import draw_digits
from ray.train import RunConfig, ScalingConfig
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn

from silverspoon_ray import (
    DistillationTrainer,
    HolisticDistiller,
    ResponseBasedDistiller,
    TeacherPlacement,
    TrainingArguments,
    create_alignments,
    load_student_weights_from_checkpoint,
)

Rows = list[dict[str, torch.Tensor]]
TEACHER_WIDTHS, STUDENT_WIDTHS = (32, 64, 64), (8, 16, 16)
TEST_IMAGES, LABELS_PER_DIGIT, IGNORED = 600, 10, -100

# Chosen for each way from a few values, on 200 of the training images that were held back for it.
LEARNING_RATE = {"alone": 1e-2, "response-based": 3e-2, "feature-based": 1e-2}
ALPHA = {"response-based": 0.1, "feature-based": 0.5}  # weight of the labels
FEATURES: dict[str, Any] = {"modules": "stem|middle|top", "loss_function": "mse", "auto_projector": True}


class Net(nn.Module):
    """Three convolutional stages whose names are the same in teacher and student, and a linear head."""

    def __init__(self, widths: tuple[int, int, int], seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stem = self.stage(1, widths[0], stride=1)
            self.middle = self.stage(widths[0], widths[1], stride=2)
            self.top = self.stage(widths[1], widths[2], stride=1)
            self.head = nn.Linear(widths[2], 10)

    @staticmethod
    def stage(inputs: int, outputs: int, stride: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        maps = self.top(self.middle(self.stem(pixel_values)))
        return self.head(maps.mean(dim=(2, 3)))


def load_images() -> tuple[Rows, Rows]:
    """Training and test images: always the same split."""
    data = load_digits()
    pixels, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"pixel_values": pixels[index], "labels": labels[index]} for index in order]
    return rows[TEST_IMAGES:], rows[:TEST_IMAGES]


def few_labels(train: Rows, seed: int) -> tuple[Rows, Rows]:
    """The images that keep their label, as many of each digit; and all, where the others' label is one to ignore.

    In the second the labelled ones are repeated, so that they are half of it.
    """
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    by_digit = [[train[i] for i in order if train[i]["labels"] == digit] for digit in range(10)]
    labelled = [row for rows in by_digit for row in rows[:LABELS_PER_DIGIT]]
    others = [{**row, "labels": torch.tensor(IGNORED)} for rows in by_digit for row in rows[LABELS_PER_DIGIT:]]
    return labelled, labelled * (len(others) // len(labelled)) + others


def arguments(way: str, steps: int, seed: int, **further: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": steps,
        "per_device_train_batch_size": 64,
        "learning_rate": LEARNING_RATE[way],
        "lr_scheduler_type": "cosine",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": seed,
    }
    return TrainingArguments(**settings | further)


def learn_from_labels(model: nn.Module, rows: Rows, steps: int, seed: int) -> None:
    """Hugging Face's own Trainer: for the teacher, and for the student alone."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return F.cross_entropy(logits, labels)

    args = arguments("alone", steps, seed, label_names=["labels"])
    run(transformers.Trainer(model, args, train_dataset=rows, compute_loss_func=loss))


def learn_from_teacher(way: str, student: nn.Module, teacher: nn.Module, rows: Rows, steps: int, seed: int) -> None:
    further: dict[str, Any] = {"student_model": student, "teacher_model": teacher, "train_dataset": rows}
    if way == "response-based":
        # "none": every image counts for the teacher's logits. By default one whose label is ignored does not.
        args = arguments(way, steps, seed, alpha=ALPHA[way], distill_mask="none")
        softened: dict[str, Any] = {"soft_loss_fn": "kl_divergence", "soft_loss_fn_kwargs": {"temperature": 4.0}}
        run(ResponseBasedDistiller(args=args, **softened, **further))
    else:
        args = arguments(way, steps, seed, alpha=ALPHA[way])
        run(HolisticDistiller(args=args, alignments=create_alignments(teacher, student, **FEATURES), **further))


def run(trainer: transformers.Trainer) -> None:
    """Train without a line for each run."""
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def learn_on_ray(teacher: nn.Module, rows: Rows, steps: int, seed: int, directory: Path) -> Net:
    """The feature-based run once more: the teacher in an actor of its own, the student in a worker of Ray Train."""
    further = {"alpha": ALPHA["feature-based"], "save_strategy": "steps", "save_steps": steps}
    trainer = DistillationTrainer(
        "holistic",
        teacher=teacher,
        student=partial(Net, STUDENT_WIDTHS, seed),
        args=arguments("feature-based", steps, seed, teacher_placement=TeacherPlacement(device_type="cpu"), **further),
        train_dataset=rows,
        alignments=FEATURES,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=f"{time.time_ns()}", storage_path=str(directory.absolute() / "runs")),
    )
    student = Net(STUDENT_WIDTHS, seed)
    load_student_weights_from_checkpoint(student, trainer.fit().checkpoint.path, "")
    return student


@torch.no_grad()
def accuracy(model: nn.Module, rows: Rows) -> float:
    batch = torch.utils.data.default_collate(rows)
    right = model.eval()(batch["pixel_values"]).argmax(-1) == batch["labels"]
    return right.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path("digits"))
    parser.add_argument("--quick", action="store_true", help="a few steps and one seed, to see that it runs")
    options = parser.parse_args()
    steps, seeds = (20, [1]) if options.quick else (300, [1, 2, 3])
    options.output_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the models are tiny
    transformers.utils.logging.set_verbosity_error()
    begin = time.perf_counter()

    train, test = load_images()
    teacher = Net(TEACHER_WIDTHS, seed=0)
    learn_from_labels(teacher, train, max(steps, 100), seed=0)
    students: dict[tuple[str, int], Net] = {}
    for seed in seeds:
        labelled, mixed = few_labels(train, seed)
        for way in LEARNING_RATE:
            student = students[way, seed] = Net(STUDENT_WIDTHS, seed)
            if way == "alone":
                learn_from_labels(student, labelled, steps, seed)
            else:
                learn_from_teacher(way, student, teacher, mixed, steps, seed)

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
    _, mixed = few_labels(train, seeds[0])
    on_ray = learn_on_ray(teacher, mixed, steps, seeds[0], options.output_dir)
    ray.shutdown()
    local = students["feature-based", seeds[0]].state_dict()
    identical = all(torch.equal(tensor, local[name]) for name, tensor in on_ray.state_dict().items())

    found = {way: [accuracy(students[way, seed], test) for seed in seeds] for way in LEARNING_RATE}
    size = {"teacher": parameters(teacher), "student": parameters(on_ray)}
    teacher_accuracy = accuracy(teacher, test)
    print(f"\n{'test accuracy':34} {'mean':>7}   seeds {seeds}")
    print(f"{f'teacher, {len(train)} labels':34} {teacher_accuracy:7.2%}   {size['teacher']} parameters")
    for way, values in found.items():
        print(f"{'student, ' + way:34} {statistics.mean(values):7.2%}   " + "  ".join(f"{v:.2%}" for v in values))
    print(
        f"{'student, feature-based, on Ray':34} {accuracy(on_ray, test):7.2%}   "
        f"weights {'identical to' if identical else 'differ from'} those without Ray; {size['student']} parameters"
    )
    results = {
        "what": "digits: test accuracy of one student trained three ways for the same steps, by seed",
        "labels_of_student": 10 * LABELS_PER_DIGIT,
        "steps": steps,
        "seeds": seeds,
        "parameters": size,
        "teacher": teacher_accuracy,
        "student": found,
        "mean": {way: statistics.mean(values) for way, values in found.items()},
        "on_ray": {"accuracy": accuracy(on_ray, test), "identical_to_local": identical},
        "seconds": time.perf_counter() - begin,
    }
    (options.output_dir / "digits.json").write_text(json.dumps(results, indent=1) + "\n")
    title = f"The same student with {10 * LABELS_PER_DIGIT} labels, the same {steps} steps, three ways"
    draw_digits(found, teacher_accuracy, title, options.output_dir / "digits.png")
    print(f"{results['seconds']:.0f} s; written to {options.output_dir}: digits.json, digits.png")


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
