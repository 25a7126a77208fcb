"""The order of the data, whoever draws it: one order on all ranks, and the same one after a restart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import silverspoon_ray
from silverspoon_ray import ResponseBasedDistiller
from tests.support import Pad, gpt2, llama, ragged_data, trained, training_arguments, without_times

ORDERS: dict[str, dict[str, Any]] = {
    "seedable": {},
    "global generators": {"accelerator_config": {"use_seedable_sampler": False}},
    "by length": {"train_sampling_strategy": "group_by_length"},
    "sequential": {"train_sampling_strategy": "sequential"},
}


class RecordingPad(Pad):
    """Remembers what it collated, and draws random numbers doing so."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.seen += [tuple(sample["input_ids"].tolist()) for sample in samples]
        batch = super().__call__(samples)
        batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.2, -100)
        return batch


def distiller(output_dir: Any, collator: Any, **arguments: Any) -> ResponseBasedDistiller:
    return ResponseBasedDistiller(
        student_model=gpt2(1),
        teacher_model=llama(2),
        train_dataset=ragged_data(24),
        data_collator=collator,
        args=training_arguments(
            silverspoon_ray, output_dir=str(output_dir), max_steps=9, save_strategy="steps", save_steps=2, **arguments
        ),
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_a_resumed_run_sees_what_the_stopped_one_had_not(tmp_path: Any, order: str, workers: int) -> None:
    """Resumes in the middle of the second epoch."""
    arguments = {**ORDERS[order], "dataloader_num_workers": workers}
    whole = trained(distiller(tmp_path, collator := RecordingPad(), **arguments))
    resumed_collator = RecordingPad()
    resumed = trained(
        distiller(tmp_path, resumed_collator, **arguments), resume_from_checkpoint=str(tmp_path / "checkpoint-8")
    )
    if workers == 0:  # a worker process has random numbers of its own, which begin anew; the samples are the same
        drop = {"train_loss"}
        assert [{k: v for k, v in row.items() if k not in drop} for row in without_times(resumed)] == [
            {k: v for k, v in row.items() if k not in drop} for row in without_times(whole)
        ]
        assert resumed_collator.seen[:4] == collator.seen[8 * 4 : 9 * 4]


@pytest.mark.parametrize("order", ORDERS)
def test_every_rank_draws_the_same_order(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks divide one order among themselves; what an iteration draws must not depend on the rank."""
    seen = []
    for rank in range(2):
        instance = distiller("unused", RecordingPad(), **ORDERS[order])
        monkeypatch.setattr(silverspoon_ray.TrainingArguments, "process_index", rank)
        loader = instance._with_lookahead(instance.get_train_dataloader(), training=True)
        torch.manual_seed(rank)  # ranks may have drawn differently for their students by now
        list(loader)
        seen.append(instance.data_collator.seen)
    assert seen[0] == seen[1]
