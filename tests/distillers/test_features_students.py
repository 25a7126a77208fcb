"""Students as people have them: LoRA, frozen parts, tied and nested alignments, several alignments on one module."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

import silverspoon_ray
from silverspoon_ray import BlockwiseDistiller, HolisticDistiller, create_alignments
from silverspoon_ray.errors import AlignmentError, ConfigError
from tests.distillers import kinds
from tests.distillers.feature_kinds import FEATURES
from tests.distillers.kinds import KINDS, Collator
from tests.distillers.widths import WIDTHS
from tests.support import PrinterCallback, token_data, trained, training_arguments

BUILDS = [HolisticDistiller, BlockwiseDistiller]
IDS = ["holistic", "blockwise"]


def distiller(
    build: Any, student: nn.Module, teacher: nn.Module, alignments: Any, data: str = "llama", **arguments: Any
) -> Any:
    built = build(
        teacher_model=teacher,
        student_model=student,
        alignments=alignments,
        train_dataset=KINDS[data].data(8, 1),
        data_collator=Collator(data),
        args=training_arguments(silverspoon_ray, **{"max_steps": 3, "learning_rate": 0.05, **arguments}),
    )
    built.remove_callback(PrinterCallback)
    return built


def lora(seed: int = 0) -> Any:
    student = WIDTHS["llama"].student(seed)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return get_peft_model(student, config)


@pytest.mark.parametrize("alpha", [0.0, 0.4])
@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_lora(build: Any, alpha: float, tmp_path: Path) -> None:
    """Adapters and projectors learn, nothing else does; what is saved is the adapter, and a run resumes from it."""
    modules = {r"model\.layers\.[12]": r"base_model\.model\.model\.layers\.[01]"}
    runs = []
    for resume in (None, str(tmp_path / "whole" / "checkpoint-2")):
        student, teacher = lora(), WIDTHS["llama"].teacher()
        before = copy.deepcopy(student.state_dict())
        built = distiller(
            build,
            student,
            teacher,
            create_alignments(teacher, student, modules),
            alpha=alpha,
            output_dir=str(tmp_path / ("whole" if resume is None else "resumed")),
            save_strategy="steps",
            save_steps=1,
        )
        history = trained(built, resume_from_checkpoint=resume)
        runs.append([row["loss"] for row in history if "loss" in row])
        for key, value in student.state_dict().items():
            assert torch.equal(value, before[key]) is not ("lora_" in key), key
    assert runs[0] == runs[1]
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert all("lora_" in key for key in load_file(checkpoint / "adapter_model.safetensors"))
    assert (checkpoint / "projectors.safetensors").is_file()
    again = PeftModel.from_pretrained(WIDTHS["llama"].student(), checkpoint).eval()
    ids = torch.stack([sample["input_ids"] for sample in token_data(2)])
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, student.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("build", BUILDS, ids=IDS)
@pytest.mark.parametrize("frozen", ["embeddings", "block", "student"])
def test_frozen_parts_stay(frozen: str, build: Any) -> None:
    """Of a student that is frozen whole the projectors learn all the same."""
    kind = WIDTHS["llama"]
    student, teacher = kind.student(), kind.teacher()
    part = {"embeddings": student.model.embed_tokens, "block": student.model.layers[0], "student": student}[frozen]
    part.requires_grad_(False)
    before = copy.deepcopy(student)
    built = distiller(build, student, teacher, create_alignments(teacher, student, kind.modules))
    start = {key: value.detach().clone() for key, value in built.student_model.named_parameters()}
    trained(built)
    still = {key for key, value in before.named_parameters() if not value.requires_grad}
    for key, value in student.named_parameters():
        if key in still:
            assert torch.equal(value, start[key]), key
        elif ".layers." in key or "projectors" in key:
            assert not torch.equal(value, start[key]), key


@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_several_alignments_on_one_module(build: Any) -> None:
    """Two losses on the same pair, and two teachers' layers for one student's: all are logged, all count."""
    student, teacher = FEATURES["llama"].models()
    one = create_alignments(teacher, student, {r"model\.layers\.1": r"model\.layers\.0"})
    two = create_alignments(teacher, student, {r"model\.layers\.1": r"model\.layers\.0"}, loss_function="cosine")
    three = create_alignments(teacher, student, {r"model\.layers\.2": r"model\.layers\.0"})
    built = distiller(build, student, teacher, [*one, *two, *three], optim="sgd")
    row = trained(built)[0]
    names = ["loss/.model.layers.0", "loss/.model.layers.0#cosine", "loss/.model.layers.0#mse"]
    assert {key for key in row if key.startswith("loss/")} == set(names)
    assert row["loss"] == pytest.approx(sum(row[name] for name in names), rel=1e-6)
    assert len({row[name] for name in names}) == 3


@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_a_module_within_an_aligned_module(build: Any) -> None:
    student, teacher = FEATURES["llama"].models()
    pattern = {r"model\.layers\.1(.*mlp)?": r"model\.layers\.0\1"}
    alignments = create_alignments(teacher, student, pattern)
    assert [a.student_module_name for a in alignments] == ["model.layers.0", "model.layers.0.mlp"]
    rows = trained(distiller(build, student, teacher, alignments))
    assert rows[0]["loss/.model.layers.0.mlp"] > 0


def test_tied_embeddings(tmp_path: Path) -> None:
    config = kinds.llama(0, 2).config
    config.tie_word_embeddings = True
    student, teacher = type(kinds.llama(0, 1))(config), kinds.llama(5, 3)
    names = {r"model\.embed_tokens": r"model\.embed_tokens", r"model\.layers\.1": r"model\.layers\.0"}
    alignments = create_alignments(teacher, student, names)
    built = distiller(
        HolisticDistiller,
        student,
        teacher,
        alignments,
        alpha=0.4,
        output_dir=str(tmp_path),
        save_strategy="steps",
        save_steps=3,
    )
    trained(built)
    assert student.lm_head.weight is student.model.embed_tokens.weight
    again = type(student).from_pretrained(tmp_path / "checkpoint-3")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, student.lm_head.weight)


# ---- sizes that do not fit -----------------------------------------------------------------------------------


def cka(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """A loss between features of any two sizes (Kornblith et al. 2019)."""
    own, other = (rows.flatten(0, -2) - rows.flatten(0, -2).mean(0) for rows in (student, teacher))
    return 1 - (own.T @ other).square().sum() / ((own.T @ own).norm() * (other.T @ other).norm())


@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_other_sizes_without_projectors(build: Any) -> None:
    """An error before training: which of the two it is, and both shapes."""
    kind = WIDTHS["llama"]
    student, teacher = kind.student(), kind.teacher()
    alignments = create_alignments(teacher, student, kind.modules, auto_projector=False)
    with pytest.raises(AlignmentError, match=r"projector.*48.*auto_projector=True"):
        distiller(build, student, teacher, alignments)


def test_a_loss_of_ones_own_takes_any_size() -> None:
    kind = WIDTHS["llama"]
    student, teacher = kind.student(), kind.teacher()
    alignments = create_alignments(teacher, student, kind.modules, auto_projector=False, loss_function=cka)
    settings = {"max_steps": 8, "learning_rate": 2e-3, "per_device_train_batch_size": 8}
    built = distiller(HolisticDistiller, student, teacher, alignments, **settings)
    losses = [row["loss"] for row in trained(built) if "loss" in row]
    assert not any(alignment.projectors for alignment in built.alignments)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_other_lengths_cannot_be_bridged(build: Any) -> None:
    """A projector changes feature sizes and nothing else."""

    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.layer = nn.Linear(6, 6), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.inner(x).reshape(len(x), 2, 3))

    student, teacher = Halved(), kinds.perceptron(5, 1)
    alignments = create_alignments(teacher, student, {r"layers\.0": "layer"})
    with pytest.raises(AlignmentError, match="projector"):
        distiller(build, student, teacher, alignments, "perceptron", remove_unused_columns=False)


@pytest.mark.parametrize("build", BUILDS, ids=IDS)
def test_nothing_to_align(build: Any) -> None:
    student, teacher = FEATURES["llama"].models()
    with pytest.raises(ConfigError, match="alignments"):
        distiller(build, student, teacher, [])
    other = FEATURES["llama"].models()[0]
    foreign = create_alignments(teacher, other, FEATURES["llama"].modules)
    with pytest.raises(AlignmentError, match="student that is trained"):
        distiller(build, student, teacher, foreign)
