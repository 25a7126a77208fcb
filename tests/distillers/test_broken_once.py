"""What a hunt for wrong numbers found, each once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import silverspoon_ray
from silverspoon_ray import BlockwiseDistiller, HolisticDistiller, create_alignments
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherRequest
from tests.support import Pad, llama, ragged_data, seeded, trained, training_arguments

PAIRS = {r"model\.layers\.[12]": r"model\.layers\.[01]"}


def curve(distiller: Any, **train: Any) -> list[float]:
    return [row["loss"] for row in trained(distiller, **train) if "loss" in row]


def holistic(student: Any, teacher: Any, modules: Any, data: Any = None, **arguments: Any) -> Any:
    extra = arguments.pop("extra", 0)
    keywords = {"auto_truncate": arguments.pop("auto_truncate", False)}
    return HolisticDistiller(
        student,
        teacher,
        create_alignments(teacher, student, modules),
        train_dataset=ragged_data(16) if data is None else data,
        data_collator=Pad(extra=extra) if data is None else None,
        args=training_arguments(silverspoon_ray, **arguments),
        **keywords,
    )


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.cat([x, skip], -1)))


class Skips(nn.Module):
    """A block takes what an earlier block gave."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.up = nn.ModuleList(Up() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.up:
            x = layer(x, kept.pop())
        return x


def test_skip_connections_between_blocks() -> None:
    """The same model, and nothing learned: the loss is 0 in every step, not in the first alone."""
    teacher = Skips().eval()
    student = copy.deepcopy(teacher)
    data = [{"x": torch.randn(8, generator=torch.Generator().manual_seed(i))} for i in range(8)]
    built = BlockwiseDistiller(
        teacher_model=teacher,
        alignments=create_alignments(teacher, student, r"(down|up)\.\d"),
        train_dataset=data,
        args=training_arguments(silverspoon_ray, max_steps=3, learning_rate=0.0),
    )
    assert curve(built) == [0.0, 0.0, 0.0]


class Recurrent(nn.Module):
    """Its cell fires as often as the batch is long."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.embed, self.cell = nn.Embedding(64, 8), nn.RNNCell(8, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = None
        for position in range(input_ids.shape[1]):
            hidden = self.cell(self.embed(input_ids[:, position]), hidden)
        assert hidden is not None
        return hidden


def test_a_module_that_fires_once_for_each_token() -> None:
    teacher = LocalTeacher(Recurrent().eval())
    request = TeacherRequest(logits=None, outputs=("cell",))
    for length in (3, 5, 2):
        batch = {"input_ids": torch.randint(0, 64, (2, length))}
        assert torch.equal(teacher.answer(batch, request).outputs["cell"], teacher.model(**batch))
    data = [{"input_ids": torch.randint(1, 64, (length,))} for length in (3, 5, 2, 6)]
    same = holistic(Recurrent(), Recurrent(), "cell", data, max_steps=4, per_device_train_batch_size=1)
    assert curve(same) == [0.0, 0.0, 0.0, 0.0]


def albert(seed: int, layers: int) -> Any:
    with seeded(seed):
        return transformers.AlbertForMaskedLM(
            transformers.AlbertConfig(
                vocab_size=64,
                embedding_size=8,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=layers,
                num_attention_heads=2,
                max_position_embeddings=64,
                hidden_dropout_prob=0,
                attention_probs_dropout_prob=0,
            )
        )


def test_truncation_of_a_student_whose_layer_fires_often() -> None:
    name = r"albert\.encoder\.albert_layer_groups\.0"
    curves = [
        curve(holistic(albert(0, 3), albert(5, 4), name, auto_truncate=cut, max_steps=3)) for cut in (False, True)
    ]
    assert curves[0] == curves[1]


def qwen3(seed: int) -> Any:
    with seeded(seed):
        return transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=64,
                pad_token_id=0,
            )
        )


def test_padding_of_features_with_heads() -> None:
    """``[batch, positions, heads, width]``: more padding changes nothing."""
    name = r"model\.layers\.1\.self_attn\.q_norm"
    curves = [curve(holistic(qwen3(0), qwen3(5), name, extra=extra, max_steps=2)) for extra in (0, 5)]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_one_optimizer_for_several_alignments_steps_once() -> None:
    student, teacher = llama(0, 16, 2), llama(5, 16, 3)
    built = holistic(student, teacher, PAIRS, max_steps=3)
    optimizer = torch.optim.SGD([p for a in built.alignments for p in a.student_block.parameters()], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for alignment in built.alignments:
        alignment.optimizer, alignment.scheduler = optimizer, scheduler
    trained(built)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def test_a_checkpoint_of_other_alignments_is_refused(tmp_path: Path) -> None:
    student, teacher = llama(0, 16, 2), llama(5, 32, 3)
    saved = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    trained(holistic(student, teacher, PAIRS, max_steps=2, **saved))
    other = holistic(student, teacher, PAIRS, max_steps=4, **saved)
    other.alignments.reverse()
    with pytest.raises(ConfigError, match="the same alignments"):
        other.train(resume_from_checkpoint=True)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        yield from ragged_data(16)


def test_a_stream_gives_what_a_list_gives() -> None:
    def run(data: Any) -> list[float]:
        student, teacher = llama(0, 16, 2), llama(5, 32, 3)
        built = HolisticDistiller(
            student,
            teacher,
            create_alignments(teacher, student, PAIRS),
            train_dataset=data,
            data_collator=Pad(),
            args=training_arguments(silverspoon_ray, max_steps=3),
        )
        built._get_train_sampler = lambda *arguments: torch.utils.data.SequentialSampler(data)  # type: ignore
        return curve(built)

    assert run(Stream()) == run(ragged_data(16))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["holistic", "blockwise"])
def test_a_student_in_bfloat16_with_projectors(kind: str, autocast: bool) -> None:
    student, teacher = llama(0, 16, 2).bfloat16(), llama(5, 32, 3)
    common: dict[str, Any] = {
        "teacher_model": teacher,
        "alignments": create_alignments(teacher, student, PAIRS),
        "train_dataset": ragged_data(16),
        "data_collator": Pad(),
        "args": training_arguments(silverspoon_ray, max_steps=3, bf16=autocast),
    }
    if kind == "holistic":
        common["student_model"] = student
    losses = curve({"holistic": HolisticDistiller, "blockwise": BlockwiseDistiller}[kind](**common))
    assert all(loss == loss and loss > 0 for loss in losses)
    assert losses[-1] < losses[0]
