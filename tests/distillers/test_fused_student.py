"""A student whose logits are never held is the same student, whatever it is and whatever is done to it.

Each case is trained twice, with its head left out of its forward and with ``distiller.head = None``, which is what
Trainer does. Where a case needs its logits the two are one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller
from silverspoon_ray.distillers.student_head import StudentHead
from silverspoon_ray.losses import KLDivergenceLoss
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.models.output_head import explains
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherRequest
from tests.distillers.kinds import KINDS, Collator, gpt2, llama
from tests.distillers.ranks import on_ranks
from tests.distillers.test_soft_targets import BentForCausalLM, _decoder, distiller, same
from tests.support import VOCABULARY, seeded, trained, training_arguments, without_times

BOTH = {"alpha": 0.3}


def outcome(built: Any, fused: bool, **train: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], Any]:
    if not fused:
        built.head = None
    history = without_times(trained(built, **train))
    return history, {name: value.clone() for name, value in built.model.state_dict().items()}, built


def both_ways(build: Callable[[], Any], ends_fused: bool = True) -> None:
    got, expected = outcome(build(), True), outcome(build(), False)
    same(got, expected)
    assert (got[2].head is not None) is ends_fused


# ---- students that do more than their head ------------------------------------------------------------------


class FurtherLossForCausalLM(transformers.LlamaForCausalLM):
    """Adds a penalty to its loss."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().forward(*args, **kwargs)
        if returned.loss is not None:
            returned.loss = returned.loss + 0.1 * sum(p.square().sum() for p in self.parameters())
        return returned


class LaterLossForCausalLM(FurtherLossForCausalLM):
    """And only in training."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward if self.training else super(FurtherLossForCausalLM, self).forward
        return run(*args, **kwargs)


class TwiceForCausalLM(transformers.LlamaForCausalLM):
    """Calls its head again, for logits of something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().forward(*args, **kwargs)
        self.lm_head(self.model.embed_tokens.weight[:1])
        return returned


class NeverForCausalLM(transformers.LlamaForCausalLM):
    """Multiplies with the weight of its head and never calls it."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        returned = self.model(*args, **kwargs)
        logits = returned.last_hidden_state @ self.lm_head.weight.T
        loss = None if labels is None else self.loss_function(logits, labels, VOCABULARY)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class FewerForCausalLM(transformers.LlamaForCausalLM):
    """Has rows in its head that are no classes."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        returned = super().forward(*args, **kwargs)
        returned.logits = returned.logits[..., :VOCABULARY]
        returned.loss = None if labels is None else self.loss_function(returned.logits, labels, VOCABULARY)
        return returned


class CappedForCausalLM(transformers.LlamaForCausalLM):
    """Caps its logits at a height that they do not reach before they are trained."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        returned = super().forward(*args, **kwargs)
        returned.logits = 30 * (returned.logits / 30).tanh()
        returned.loss = None if labels is None else self.loss_function(returned.logits, labels, VOCABULARY)
        return returned


def plain(model: Any, **config: Any) -> Callable[[], Any]:
    return lambda: _decoder(transformers.LlamaConfig, model, 0, 1, **config)


def with_loss_function() -> Any:
    """As transformers' documentation says to bring a loss of one's own."""
    student = llama(0, 1)

    def twice(logits: torch.Tensor, labels: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return 2 * F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))

    student.loss_function = twice
    return student


def with_rows_that_are_no_classes() -> Any:
    student = plain(FewerForCausalLM)()
    with seeded(1):
        student.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    student.config.vocab_size = VOCABULARY
    return student


def with_a_head_of_zeros() -> Any:
    """A common start, in which a scale or cap behind the head cannot be seen."""
    student = plain(BentForCausalLM)()
    torch.nn.init.zeros_(student.lm_head.weight)
    return student


def with_small_logits() -> Any:
    student = plain(CappedForCausalLM)()
    with torch.no_grad():
        student.lm_head.weight *= 0.01
    return student


MORE: dict[str, Callable[[], Any]] = {
    "a further loss": plain(FurtherLossForCausalLM),
    "a further loss in training": plain(LaterLossForCausalLM),
    "a loss function": with_loss_function,
    "its head twice": plain(TwiceForCausalLM),
    "its head never": plain(NeverForCausalLM),
    "fewer classes": with_rows_that_are_no_classes,
    "a head of zeros": with_a_head_of_zeros,
    "an unknown cap": with_small_logits,
    # The first batch must take no more from the random stream than it always does.
    "dropout": plain(BentForCausalLM, attention_dropout=0.5),
}


@pytest.mark.parametrize("case", MORE)
def test_students_that_do_more(case: str) -> None:
    both_ways(lambda: distiller("llama", MORE[case](), llama(5, 2), **BOTH), ends_fused=False)


def test_seen_in_evaluation_first() -> None:
    """What an evaluation before training has seen says nothing of the loss in training."""

    def build() -> Any:
        built = distiller("llama", plain(LaterLossForCausalLM)(), llama(5, 2), **BOTH)
        built.evaluate()
        return built

    both_ways(build, ends_fused=False)


def test_buffers_and_random_states_are_left_alone() -> None:
    """By the look at what is behind the head."""
    with seeded(0):
        student = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 4)
        )
    before = {name: value.clone() for name, value in student.state_dict().items()}
    state = torch.get_rng_state()
    head = StudentHead(lambda: student, "3")
    assert head.explains({"input": torch.randn(4, 6, generator=torch.Generator())}, False, False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


# ---- what users do to a student and to a distiller -----------------------------------------------------------


def hooked(add: Callable[[Any], Any]) -> Callable[[], Any]:
    def build() -> Any:
        student = llama(0, 1)
        add(student)
        return distiller("llama", student, llama(5, 2), **BOTH)

    return build


class Tripled(KLDivergenceLoss):
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 3 * super().__call__(*args, **kwargs)


class DoubledDistiller(ResponseBasedDistiller):
    def distillation_terms(self, outputs: Any, answer: Any, mask: Any) -> dict[str, torch.Tensor]:
        return {name: 2 * value for name, value in super().distillation_terms(outputs, answer, mask).items()}


def doubled() -> Any:
    return DoubledDistiller(
        llama(0, 1),
        llama(5, 2),
        train_dataset=KINDS["llama"].data(16, 1),
        data_collator=Collator("llama"),
        args=training_arguments(silverspoon_ray, **BOTH, max_steps=3, optim="sgd", learning_rate=0.5),
    )


def prepared(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    def build() -> Any:
        built = distiller("llama", llama(0, 1), llama(5, 2), **BOTH)
        built.prepare_student_inputs = lambda batch: {
            **batch,
            **{key: change(batch[key]) for key, change in changes.items()},
        }
        return built

    return build


def made_anew() -> Any:
    """As a search for hyperparameters does for each trial."""
    built = distiller("llama", llama(1, 1), llama(5, 2), **BOTH)
    built.model_init = lambda: llama(0, 1)
    return built


DONE: dict[str, tuple[Callable[[], Any], bool]] = {
    "hook on the head": (hooked(lambda s: s.lm_head.register_forward_hook(lambda m, a, out: out * 2)), True),
    "hook on the model": (hooked(lambda s: s.register_forward_hook(lambda m, a, out: out)), True),
    "hook on the head's gradient": (
        hooked(lambda s: s.lm_head.register_full_backward_hook(lambda m, into, of: (into[0] * 0.5,))),
        True,
    ),
    "hook before the head": (hooked(lambda s: s.lm_head.register_forward_pre_hook(lambda m, a: (a[0] * 2,))), True),
    "weight norm": (hooked(lambda s: torch.nn.utils.weight_norm(s.lm_head)), True),
    "a subclass of a loss": (lambda: distiller("llama", llama(0, 1), llama(5, 2), soft_loss_fn=Tripled()), False),
    "a subclass of the distiller": (doubled, False),
    "other labels": (prepared(labels=lambda labels: labels.roll(1, 1)), True),
    "other inputs": (prepared(input_ids=lambda ids: ids.flip(0)), True),
    "a new model": (made_anew, True),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("case", DONE)
def test_what_users_do(case: str) -> None:
    build, ends_fused = DONE[case]
    both_ways(build, ends_fused)


def test_hooks_see_logits() -> None:
    """All of them, of every batch; also hooks that come later."""
    seen: list[int] = []
    built = distiller("llama", llama(0, 1), llama(5, 2), max_steps=2, eval_strategy="no", **BOTH)
    batch = Collator("llama")(KINDS["llama"].data(4, 1))
    built.compute_loss(built.model, dict(batch))
    assert built.head is not None
    hook = built.model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[-1]))
    trained(built)
    assert set(seen) == {VOCABULARY}
    hook.remove()
    assert built.head.usable


def test_an_exception_leaves_the_head_as_it_was() -> None:
    student = llama(0, 1)
    built = distiller("llama", student, llama(5, 2), **BOTH)
    batch = Collator("llama")(KINDS["llama"].data(4, 1))
    expected = student(input_ids=batch["input_ids"]).logits

    def fail(module: Any, args: Any) -> None:
        raise ValueError("no")

    for verified in (False, True):
        if verified:
            built.compute_loss(student, dict(batch))
        hook = student.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="no"):
            built.compute_loss(student, dict(batch))
        hook.remove()
        assert "forward" not in vars(student.lm_head)
        assert torch.equal(student(input_ids=batch["input_ids"]).logits, expected)


@pytest.mark.parametrize("form", ["full", "hidden", "top_k"])
@pytest.mark.parametrize("shared", ["model", "head"])
def test_a_teacher_that_shares_the_head(shared: str, form: str) -> None:
    """Its logits are whole while the student's are left out."""

    def build() -> Any:
        student = llama(0, 1)
        teacher: Any = student
        if shared == "head":
            teacher = llama(5, 2)
            teacher.lm_head = student.lm_head
        return distiller("llama", student, teacher, teacher_logits=form, teacher_top_k=VOCABULARY, **BOTH)

    both_ways(build)


def test_resumed(tmp_path: Any) -> None:
    """In the middle, with dropout: the batch after the checkpoint is looked at first, which changes no bit."""

    def build() -> Any:
        where = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
        return distiller("gpt2", gpt2(0, 1, dropout=0.2), gpt2(5, 2), max_steps=5, **where, **BOTH)

    whole = outcome(build(), True)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = outcome(build(), True, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert whole[2].head is not None
    assert resumed[0][:5] == whole[0][:5]
    assert all(torch.equal(value, whole[1][name]) for name, value in resumed[1].items())


def test_flops_by_hand() -> None:
    """The first step's look at what is behind the head is no part of what a step takes, and every block is counted."""
    classes, width, samples, length = 4096, 16, 4, 400
    data = [{"x": torch.randn(length, 6), "labels": torch.full((length,), -100)}] * 8
    with seeded(0):
        student, teacher = (
            torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, classes)) for _ in range(2)
        )

    class Named(torch.nn.Module):
        def __init__(self, layers: torch.nn.Module) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    args = training_arguments(silverspoon_ray, count_flops=True, max_steps=2, distill_mask="none")
    built = ResponseBasedDistiller(
        Named(student), Named(teacher), train_dataset=data, args=args, output_head_layer="layers.1"
    )
    rows = [row for row in trained(built) if "flops/step" in row]
    assert built.head is not None
    each = 2 * samples * length * width  # of a product with one class, or with one input
    # Teacher and student forward and the student's backward, without the gradient of its inputs; the first class again.
    assert [row["flops/step"] for row in rows] == [each * (classes + 6) + each * (3 * classes + 2 * 6) + each] * 2


# ---- ranks -----------------------------------------------------------------------------------------------------

RANKS = {
    "unused": {"ddp_find_unused_parameters": True},
    "accumulated": {
        "ddp_find_unused_parameters": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    },
    "hidden": {"teacher_logits": "hidden", "gradient_checkpointing": True},
}


def on_a_rank() -> list[Any]:
    """Eleven samples in two epochs over two ranks: the last batches are uneven."""
    found = []
    for settings in RANKS.values():
        for student in (lambda: llama(0, 1), plain(FurtherLossForCausalLM)):
            pair = []
            for fused in (True, False):
                arguments = {"max_steps": 4, "optim": "sgd", "remove_unused_columns": False, **BOTH, **settings}
                built = ResponseBasedDistiller(
                    student(),
                    llama(5, 2),
                    train_dataset=KINDS["llama"].data(11, 1),
                    eval_dataset=KINDS["llama"].data(5, 2),
                    data_collator=Collator("llama"),
                    args=training_arguments(silverspoon_ray, **arguments),
                )
                history, _, _ = outcome(built, fused)
                history.append(without_times([built.evaluate()])[0])
                parameters = {name: value.detach().clone() for name, value in built.student_model.named_parameters()}
                pair.append((history, parameters, built.head is not None))
            found.append(pair)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return on_ranks(on_a_rank)


@pytest.mark.parametrize("case", range(2 * len(RANKS)), ids=[f"{n}-{s}" for n in RANKS for s in ("llama", "more")])
def test_two_ranks(case: int, ranks: list[Any]) -> None:
    for rank in ranks:
        fused, full = rank[case]
        same(fused, full)
        assert fused[2] is (case % 2 == 0)
    for name, value in ranks[0][case][0][1].items():
        assert torch.equal(value, ranks[1][case][0][1][name]), name


# ---- the teacher's head ----------------------------------------------------------------------------------------


def test_a_head_is_judged_where_it_shows() -> None:
    """Not at padding, whose hidden states may be anything, nor where logits are small; banned classes are no matter."""
    with seeded(0):
        hidden, bias = torch.randn(2, 5, 4), torch.zeros(8)
        head = OutputHead(torch.randn(8, 4), bias.index_fill(0, torch.tensor(3), float("-inf")))
    hidden[0, 0] = 0.0
    padded = hidden.index_fill(1, torch.tensor(0), float("nan"))
    logits = head.logits(hidden)
    assert explains(head, hidden, logits)
    assert explains(head, padded, head.logits(padded))
    assert not explains(head, hidden, logits * 1.01)
    assert not explains(head, hidden, logits[..., :7])
    assert not explains(head, hidden, logits.masked_fill(torch.arange(8) == 4, float("-inf")))
    assert not explains(head, hidden[0], logits)


def test_a_teacher_with_fewer_classes_than_its_head_is_refused() -> None:
    """The others would get probability from the student's side."""
    teacher = LocalTeacher(with_rows_that_are_no_classes())
    with pytest.raises(silverspoon_ray.errors.ConfigError, match="does more behind its lm_head"):
        teacher.answer({"input_ids": torch.ones(1, 4, dtype=torch.long)}, TeacherRequest(logits="hidden"))
