"""Blockwise: blocks learn alone, from the teacher's hidden states and the student's own masks and positions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration
from transformers.cache_utils import Cache

import silverspoon_ray
from silverspoon_ray import BlockwiseDistiller, create_alignments
from silverspoon_ray.distillers.trunk import Trunk
from silverspoon_ray.errors import AlignmentError, ConfigError
from tests.distillers.feature_kinds import FEATURES, alignments_of, watched
from tests.distillers.kinds import KINDS, Collator, kind_of
from tests.support import VOCABULARY, seeded, trained, training_arguments

EVERY_KIND = [name for name in FEATURES if name != "perceptron"]


def distiller(name: str, student: nn.Module, kept: slice = slice(None), loss: str = "mse", **arguments: Any) -> Any:
    kind = FEATURES[name]
    teacher = kind.models()[1]
    alignments = alignments_of(name, loss, student, teacher)
    for number, alignment in enumerate(alignments):
        alignment.input_projector = kind.projector(number, "input")
    return BlockwiseDistiller(
        teacher_model=teacher,
        student_model=student,
        alignments=alignments[kept],
        train_dataset=kind_of(kind.base).data(8, 1),
        data_collator=Collator(kind.base),
        args=training_arguments(
            silverspoon_ray,
            **{
                "max_steps": 1,
                "per_device_train_batch_size": 8,
                "optim": "sgd",
                "learning_rate": 1.0,
                "lr_scheduler_type": "constant",
                "max_grad_norm": 0,
                "remove_unused_columns": False,
                **arguments,
            },
        ),
    )


def changed(student: nn.Module, before: nn.Module) -> set[str]:
    start = dict(before.named_parameters())
    now = dict(student.named_parameters())
    return {key for key, value in start.items() if not torch.equal(value, now[key])}


@pytest.mark.parametrize("per_block", [False, True], ids=["together", "per_block"])
@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_block_learns_the_same_without_the_others(name: str, per_block: bool) -> None:
    """Bit-equal; and nothing but aligned blocks and their projectors learns."""
    together = FEATURES[name].models()[0]
    before = copy.deepcopy(together)
    built = distiller(name, together, backward_per_block=per_block)
    trained(built)
    learned: set[str] = set()
    for number, alignment in enumerate(built.alignments):
        alone = copy.deepcopy(before)
        single = distiller(name, alone, slice(number, number + 1), backward_per_block=per_block)
        trained(single)
        block = alignment.student_module_name
        moved = changed(alone, before)
        assert moved
        assert all(key.startswith(f"{block}.") for key in moved)
        learned |= moved
        for key, value in alone.get_submodule(block).named_parameters():
            assert torch.equal(value, together.get_submodule(block).get_parameter(key)), f"{block}.{key}"
        for which, projector in single.alignments[0].projectors.items():
            for key, value in projector.named_parameters():
                assert torch.equal(value, alignment.projectors[which].get_parameter(key)), f"{which}.{key}"
                first = FEATURES[name].projector(number, which.removesuffix("_projector"))
                assert not torch.equal(value, first.get_parameter(key)), f"{which}.{key} does not learn"
    assert changed(together, before) == learned


@pytest.mark.parametrize("name", EVERY_KIND)
def test_per_block_is_the_same_run(name: str) -> None:
    """Bit for bit, also with AdamW, clipping and accumulation."""
    settings = {
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "max_steps": 3,
        "max_grad_norm": 0.05,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    }
    runs = []
    for per_block in (False, True):
        student = FEATURES[name].models()[0]
        built = distiller(name, student, loss="cosine", backward_per_block=per_block, **settings)
        rows = [{k: v for k, v in row.items() if "loss" in k or "norm" in k} for row in trained(built)]
        runs.append((rows[:-1], list(student.parameters())))
    for here, there in zip(runs[0][0], runs[1][0], strict=True):
        assert there == pytest.approx(here, rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_alpha_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    runs = []
    for alpha in (0.0, 0.7):
        built = distiller("llama", FEATURES["llama"].models()[0], max_steps=3, learning_rate=0.1, alpha=alpha)
        runs.append([row.get("loss") for row in trained(built)])
    assert runs[0] == runs[1]
    assert "alpha=0.7 is ignored" in caplog.text


# ---- how blocks are called -----------------------------------------------------------------------------------


def bart() -> nn.Module:
    sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        dropout=0.0,
        init_std=0.15,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        **sizes,
    )
    with seeded(0):
        return BartForConditionalGeneration(config)


MODELS = {name: (FEATURES[name].models()[0], FEATURES[name].modules) for name in ("llama", "gpt2", "bert_mlm", "t5")}
MODELS["bart"] = (bart(), {"": r"model\.(encoder|decoder)\.layers\.[01]"})


@pytest.mark.parametrize("twice", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("name", MODELS)
def test_arguments_are_the_students_own(name: str, twice: bool) -> None:
    """All but the hidden states, bit for bit, as in a whole forward of the student: masks, positions, an encoder's
    states. The second time blocks are passed over where that is possible."""
    model, modules = MODELS[name]
    model = copy.deepcopy(model).eval()
    pattern = next(iter(modules.values())).replace(r"\1", "(encoder|decoder)")
    blocks = [a.student_module_name for a in create_alignments(model, model, pattern)]
    batch = Collator("t5" if name in ("t5", "bart") else name)(KINDS["t5" if name in ("t5", "bart") else name].data(4))
    labels = batch.pop("labels")
    if name in ("t5", "bart"):
        batch["decoder_input_ids"] = labels.clamp(min=1)
    trunk = Trunk(model, [model.get_submodule(block) for block in blocks])
    for _ in range(1 + twice):
        calls = trunk.calls(model.forward, **batch, use_cache=False)
    with torch.no_grad(), watched(model, blocks) as whole:
        model(**batch, use_cache=False)
    for block in blocks:
        call = calls[model.get_submodule(block)]
        args, kwargs, _ = whole[block]
        assert call.hidden.shape == args[0].shape
        assert kwargs.keys() == call.kwargs.keys()
        for here, there in [*zip(call.args[1:], args[1:], strict=True), *((call.kwargs[k], kwargs[k]) for k in kwargs)]:
            pairs = zip(here, there, strict=True) if isinstance(there, tuple) else [(here, there)]
            for ours, theirs in pairs:
                if isinstance(theirs, torch.Tensor):
                    assert torch.equal(ours, theirs), block


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bart"])
def test_no_cache_reaches_a_block(name: str) -> None:
    """One that the block filled a moment ago would be there when it is trained."""
    model, modules = MODELS[name]
    pattern = next(iter(modules.values())).replace(r"\1", "(encoder|decoder)")
    blocks = [a.student_block for a in create_alignments(model, model, pattern)]
    ids = torch.ones(1, 4, dtype=torch.long)
    batch = {"input_ids": ids, **({"decoder_input_ids": ids} if name in ("t5", "bart") else {})}
    for call in Trunk(model, blocks).calls(model.forward, **batch, use_cache=True).values():
        assert not [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Cache)]


class Aside(nn.Module):
    """A part that its forward does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.aside = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        return self.aside(self.used(x)) if both else self.used(x)


class Both(Aside):
    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        return super().forward(x, both)


def test_a_block_that_is_not_called() -> None:
    student, teacher = Aside(), Both()
    with pytest.raises(AlignmentError, match=r"aside.*the student's forward calls"):
        BlockwiseDistiller(
            teacher_model=teacher,
            alignments=create_alignments(teacher, student, "used|aside", auto_projector=False),
            train_dataset=KINDS["perceptron"].data(4, 1),
            args=training_arguments(silverspoon_ray, max_steps=1, remove_unused_columns=False),
        )


def test_nobody_says_whose_the_blocks_are() -> None:
    """Alignments built by hand do not know their model."""
    student, teacher = FEATURES["perceptron"].models()
    alignments = alignments_of("perceptron", "mse", student, teacher)
    by_hand = [silverspoon_ray.Alignment(a.teacher_block, a.student_block) for a in alignments]
    data = KINDS["perceptron"].data(8, 1)
    args = training_arguments(silverspoon_ray, max_steps=2, remove_unused_columns=False)
    with pytest.raises(ConfigError, match="student_models"):
        BlockwiseDistiller(teacher_model=teacher, alignments=by_hand, train_dataset=data, args=args)
    built = BlockwiseDistiller(
        teacher_model=teacher, alignments=by_hand, train_dataset=data, args=args, student_models={"small": student}
    )
    rows = trained(built)
    assert {"loss/.layers.0", "loss/.layers.2"} <= rows[0].keys()
