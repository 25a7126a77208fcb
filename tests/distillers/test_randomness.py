"""Random numbers of the data: all ranks draw the same, so that whatever shuffles with them is one order everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller
from tests.distillers.kinds import gpt2
from tests.distillers.ranks import on_ranks
from tests.distillers.test_checkpoint import RandomCollator
from tests.support import PrinterCallback, token_data, trained, training_arguments


class Numbered(RandomCollator):
    """Remembers the samples it got, and a random number for each batch."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.numbers: list[float] = []

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.samples += [int(sample["input_ids"][0]) for sample in samples]
        self.numbers.append(float(torch.rand(())))
        return super().__call__(samples)


class ShuffledStream(torch.utils.data.IterableDataset):
    """Draws its samples with torch's global generator, and remembers which."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data
        self.drawn: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for _ in self.data:
            self.drawn.append(int(torch.randint(len(self.data), ())))
            yield self.data[self.drawn[-1]]


def data() -> list[dict[str, Any]]:
    """Every sample begins with its number."""
    found = token_data(40, length=8)
    for number, sample in enumerate(found):
        sample["input_ids"][0] = number
    return found


def distiller(collator: Any, dataset: Any, **keywords: Any) -> ResponseBasedDistiller:
    built = ResponseBasedDistiller(
        gpt2(0, 1, dropout=0.2),
        gpt2(5, 2),
        train_dataset=dataset,
        eval_dataset=token_data(7, length=8, seed=9),
        data_collator=collator,
        args=training_arguments(silverspoon_ray, max_steps=4, per_device_train_batch_size=2, **keywords),
    )
    built.remove_callback(PrinterCallback)
    return built


def draw_on_a_rank(kind: str) -> tuple[list[int], list[float], list[int], list[float]]:
    """Samples of this rank, its random numbers, everything that its stream has drawn, and the losses."""
    collator, stream = Numbered(), ShuffledStream(data())
    history = trained(distiller(collator, stream if kind == "stream" else data()))
    return collator.samples, collator.numbers, stream.drawn, [row["loss"] for row in history if "loss" in row]


def test_ranks_have_samples_of_their_own() -> None:
    first, second = on_ranks(draw_on_a_rank, "set")
    assert len(set(first[0]) | set(second[0])) == len(first[0]) + len(second[0])
    assert first[1] == second[1]
    assert first[3] == second[3]


def test_ranks_that_share_a_stream_draw_the_same_numbers() -> None:
    """Each reads the whole stream and keeps its part; together they have it all, and nothing twice."""
    ranks = on_ranks(draw_on_a_rank, "stream")
    assert ranks[0][1] == ranks[1][1]
    drawn = ranks[0][2]
    assert drawn == ranks[1][2]
    assert len(set(drawn)) > 5
    for rank, (samples, _, _, _) in enumerate(ranks):
        steps = len(samples) // 2
        wanted = [drawn[4 * step + 2 * rank + place] for step in range(steps) for place in (0, 1)]
        assert steps >= 4
        assert samples == wanted


def test_evaluations_can_be_compared() -> None:
    """The same masks every time, so that a difference is the student's."""
    built = distiller(RandomCollator(), data(), eval_strategy="steps", eval_steps=1, learning_rate=0.0)
    losses = [row["eval_loss"] for row in trained(built) if "eval_loss" in row]
    assert len(losses) == 4
    assert len(set(losses)) == 1
    assert built.evaluate()["eval_loss"] == losses[0]
