"""Asking ahead: within the window, in order, and without changing a number."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import GradientState
from torch.utils.data import get_worker_info
from transformers import Trainer

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller
from silverspoon_ray.teacher.lookahead import TICKET_KEY, LookaheadLoader, TeacherTraffic, Ticket, Window
from tests.distillers.kinds import gpt2, kl
from tests.distillers.test_checkpoint import RandomCollator
from tests.support import PrinterCallback, token_data, trained, training_arguments, without_times
from tests.teacher.fake import FakeTeacher

DEPTHS = [0, 1, 2, 4]
STEPS = 7


class Stream(torch.utils.data.IterableDataset):
    """Divided among the loader's workers."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return iter(self.data if worker is None else self.data[worker.id :: worker.num_workers])


def distiller(
    teacher: Any,
    depth: int,
    accumulation: int = 1,
    workers: int = 0,
    dataset: str = "map",
    dropout: float = 0.2,
    soft_loss_fn: Any = None,
    compute_metrics: Any = None,
    **keywords: Any,
) -> ResponseBasedDistiller:
    """Batches of 2; a map-style set of 12, so that there are several epochs, and 7 samples for evaluation."""
    train = Stream(token_data(60, length=8)) if dataset == "stream" else token_data(12, length=8)
    built = ResponseBasedDistiller(
        gpt2(0, 1, dropout=dropout),
        teacher,
        train_dataset=train,
        eval_dataset=token_data(7, length=8, seed=9),
        data_collator=RandomCollator(),
        soft_loss_fn=soft_loss_fn,
        compute_metrics=compute_metrics,
        args=training_arguments(
            silverspoon_ray,
            **{
                "alpha": 0.4,
                "max_steps": STEPS,
                "per_device_train_batch_size": 2,
                "per_device_eval_batch_size": 2,
                "gradient_accumulation_steps": accumulation,
                "dataloader_num_workers": workers,
                "teacher_prefetch": depth,
                "eval_strategy": "steps",
                "eval_steps": 3,
                **keywords,
            },
        ),
    )
    built.remove_callback(PrinterCallback)
    return built


CONFIGURATIONS = [
    (accumulation, workers, dataset) for accumulation in (1, 3) for workers in (0, 2) for dataset in ("map", "stream")
]


@functools.cache
def with_a_local_teacher(accumulation: int, workers: int, dataset: str) -> list[dict[str, Any]]:
    history = without_times(trained(distiller(gpt2(5, 2), 2, accumulation, workers, dataset)))
    assert len({row["loss"] for row in history if "loss" in row}) == STEPS
    return history


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("accumulation", "workers", "dataset"), CONFIGURATIONS)
def test_depth_changes_no_number(accumulation: int, workers: int, dataset: str, depth: int) -> None:
    """Bit-equal, with a collator that draws random numbers, a student with dropout, and evaluations in between."""
    teacher = FakeTeacher(gpt2(5, 2))
    history = without_times(trained(distiller(teacher, depth, accumulation, workers, dataset)))
    assert history == with_a_local_teacher(accumulation, workers, dataset)
    assert teacher.live == 0, "answers are kept after the end of training"


class Watch:
    """Notes how many answers live whenever a loss is computed, in training and in evaluation."""

    def __init__(self, teacher: FakeTeacher) -> None:
        self.teacher = teacher
        self.training: list[int] = []
        self.evaluation: list[int] = []

    def __call__(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        (self.training if torch.is_grad_enabled() else self.evaluation).append(self.teacher.live)
        return kl(student, teacher) / student.shape[0]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("accumulation", "workers", "dataset"), CONFIGURATIONS)
def test_no_more_answers_than_the_window_has_slots(accumulation: int, workers: int, dataset: str, depth: int) -> None:
    teacher = FakeTeacher(gpt2(5, 2))
    watch = Watch(teacher)
    built = distiller(teacher, depth, accumulation, workers, dataset, soft_loss_fn=watch, eval_strategy="no")
    slots = max(depth, 1)  # with depth 0 the batch that is being learned from
    trained(built)
    assert teacher.most <= slots
    assert max(watch.training) == slots, "the window is not used"
    assert teacher.live == 0
    teacher.most = 0
    built.evaluate()
    assert teacher.most <= slots
    assert max(watch.evaluation) == min(slots, 4), "the window is not used"
    assert teacher.live == 0
    assert teacher.answered == sorted(teacher.answered), "answers are not awaited in the order of the questions"
    assert len(set(teacher.answered)) == len(teacher.answered)


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_evaluation_during_training_has_a_window_of_its_own(depth: int) -> None:
    """The answers that training has asked for stay; so the bound is twice the window while evaluation lasts."""
    teacher = FakeTeacher(gpt2(5, 2))
    trained(distiller(teacher, depth, eval_steps=1))
    assert teacher.most <= max(2 * depth, 1)
    assert teacher.live == 0


def test_overlap_forbidden_means_asking_for_nothing_early() -> None:
    teacher = FakeTeacher(gpt2(5, 2))
    history = without_times(trained(distiller(teacher, 4, overlap_teacher_forward=False)))
    assert teacher.most == 1
    assert history == with_a_local_teacher(1, 0, "map")


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_run_that_stops_early_asks_for_at_most_a_window_more(accumulation: int, depth: int) -> None:
    teacher = FakeTeacher(gpt2(5, 2))
    trained(distiller(teacher, depth, accumulation, dataset="stream", eval_strategy="no"))
    assert len(teacher.answered) == STEPS * accumulation
    assert STEPS * accumulation <= len(teacher.asked) <= STEPS * accumulation + depth


# ---- resuming ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dataset", ["map", "stream"])
def test_a_resumed_run_asks_for_no_batch_again(dataset: str, accumulation: int, depth: int, tmp_path: Path) -> None:
    settings = {"dataset": dataset, "eval_strategy": "no"}
    whole, rest = FakeTeacher(gpt2(5, 2)), FakeTeacher(gpt2(5, 2))
    run = distiller(
        whole, depth, accumulation, output_dir=str(tmp_path), save_strategy="steps", save_steps=4, **settings
    )
    history = without_times(trained(run))
    resumed = distiller(rest, depth, accumulation, **settings)
    again = without_times(trained(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-4")))
    assert again[:-1] == history[:-1]
    # The set has 2 steps an epoch with accumulation 3; the stream is one long epoch.
    used = [whole.asked[number] for number in whole.answered][4 * accumulation :]
    assert rest.answered == list(range(len(used))), "a batch was asked for that nobody needs"
    for number, wanted in zip(rest.answered, used, strict=True):
        assert torch.equal(rest.asked[number], wanted)
    assert len(rest.asked) <= len(rest.answered) + depth


# ---- accelerate's own look ahead -----------------------------------------------------------------------------


class Ends:
    """A loss that notes, at each call, whether accelerate takes this for the last batch."""

    def __init__(self) -> None:
        self.training: list[bool] = []
        self.evaluation: list[tuple[bool, int]] = []

    def note(self) -> None:
        state = GradientState()
        if torch.is_grad_enabled():
            self.training.append(state.end_of_dataloader)
        else:
            self.evaluation.append((state.end_of_dataloader, state.remainder))

    def __call__(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        self.note()
        return kl(student, teacher) / student.shape[0]


class PlainTrainer(Trainer):
    def __init__(self, ends: Ends, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.ends = ends

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.ends.note()
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_end_of_the_data_is_where_trainer_sees_it(depth: int, accumulation: int) -> None:
    ends, plain = Ends(), Ends()
    samples: list[int] = []

    def count(prediction: Any) -> dict[str, float]:
        samples.append(len(prediction.label_ids))
        return {}

    built = distiller(FakeTeacher(gpt2(5, 2)), depth, accumulation, alpha=0.0, soft_loss_fn=ends, compute_metrics=count)
    trained(built)
    trainer = PlainTrainer(
        plain,
        model=gpt2(0, 1),
        train_dataset=token_data(12, length=8),
        eval_dataset=token_data(7, length=8, seed=9),
        data_collator=RandomCollator(),
        args=built.args,
    )
    trained(trainer)
    assert ends.training == plain.training
    assert True in ends.training
    assert False in ends.training
    assert ends.evaluation == plain.evaluation
    assert set(samples) == {7}


# ---- what is logged, and failures -----------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 3])
def test_traffic_is_logged(accumulation: int) -> None:
    teacher = FakeTeacher(gpt2(5, 2))
    rows = [row for row in trained(distiller(teacher, 2, accumulation)) if "loss" in row]
    assert len(rows) == STEPS
    for row in rows:  # what the evaluations in between asked for is not in it
        assert row["teacher/forwards"] == accumulation
        assert row["teacher/bytes_per_step"] == accumulation * FakeTeacher.nbytes
        assert 0 <= row["teacher/wait_fraction"] <= 1
        assert row["teacher/cache_hits"] == 0


def test_a_local_teacher_logs_no_traffic() -> None:
    assert not any(key.startswith("teacher/") for row in trained(distiller(gpt2(5, 2), 2)) for key in row)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_failing_teacher_ends_the_training(depth: int) -> None:
    teacher = FakeTeacher(gpt2(5, 2))
    teacher.fails_at = 3
    with pytest.raises(RuntimeError, match="no answer to batch 3"):
        trained(distiller(teacher, depth, eval_strategy="no"))
    assert teacher.answered == [0, 1, 2, 3]


def in_place(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return (student - teacher.mul_(2)).square().mean()


def in_place_with_mask(
    student: torch.Tensor, teacher: torch.Tensor, *, mask: Any = None, num_items: Any = None
) -> torch.Tensor:
    return in_place(student, teacher)


@pytest.mark.parametrize("loss", [in_place, in_place_with_mask])
def test_a_users_loss_cannot_write_to_shared_memory(loss: Any) -> None:
    teacher = FakeTeacher(gpt2(5, 2), borrowed=True)
    trained(distiller(teacher, 1, soft_loss_fn=loss, eval_strategy="no", distill_mask="none"))
    assert len(teacher.given) == STEPS
    for number, logits in zip(teacher.answered, teacher.given, strict=True):
        with torch.no_grad():
            untouched = gpt2(5, 2).eval()(input_ids=teacher.asked[number]).logits
        assert torch.equal(logits, untouched)


# ---- the parts -------------------------------------------------------------------------------------------------


class Slow:
    """A stream that only keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def submit(self, batch: Any) -> Any:
        self.asked.append(batch["number"])
        return type("Answer", (), {"release": lambda self: None, "nbytes": 0, "result": lambda self: batch})()


@pytest.mark.parametrize("depth", DEPTHS)
def test_window_by_hand(depth: int) -> None:
    stream = Slow()
    window = Window(stream, depth, TeacherTraffic())
    tickets = [Ticket(teacher_batch={"number": number}, window=window) for number in range(6)]
    for ticket in tickets:
        window.add(ticket)
    assert stream.asked == list(range(depth))
    for number, ticket in enumerate(tickets):
        assert ticket.answer()["number"] == number
        ticket.release()
        ticket.release()  # a second time changes nothing
        assert stream.asked == list(range(min(max(number + 1 + depth, number + 1), 6)))
    assert window.taken == 0
    assert not window.waiting


@pytest.mark.parametrize("depth", DEPTHS)
def test_loader_draws_no_further_than_it_must(depth: int) -> None:
    drawn: list[int] = []

    def batches() -> Iterator[dict[str, Any]]:
        for number in range(6):
            drawn.append(number)
            yield {"number": number}

    class Base:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            return batches()

        def __len__(self) -> int:
            return 6

        batch_size = 3

    stream = Slow()
    loader = LookaheadLoader(
        Base(),
        seed=lambda: 0,
        window=lambda: Window(stream, depth, TeacherTraffic()),
        teacher_inputs=lambda batch: {"number": batch["number"]},
        depth=depth,
        skip=2,
    )
    assert len(loader) == 6
    assert loader.batch_size == 3
    for number, batch in enumerate(loader):
        assert batch["number"] == number
        assert drawn == list(range(min(number + max(depth, 1), 6)))
        assert (batch[TICKET_KEY].window is None) == (number < 2), "a skipped batch must not be asked for"
        if number >= 2:
            batch[TICKET_KEY].answer()
            batch[TICKET_KEY].release()
    assert stream.asked == [2, 3, 4, 5]
    assert [batch[TICKET_KEY].window is None for batch in loader] == [False] * 6, "only the first pass skips"
