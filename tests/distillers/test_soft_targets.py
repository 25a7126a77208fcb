"""What travels instead of logits, and a student whose logits are never held: the same losses, the same student."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import silverspoon_ray
from silverspoon_ray.distillers import HolisticDistiller, ResponseBasedDistiller
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.lookahead import TICKET_KEY, Ticket
from silverspoon_ray.teacher.protocol import TeacherRequest
from tests.distillers.kinds import KINDS, SPREAD, Collator, Padding, bert_classifier, gpt2, llama, mean_squared
from tests.support import VOCABULARY, seeded, trained, training_arguments, without_times


def _decoder(config: Any, model: Any, seed: int, layers: int, **keywords: Any) -> Any:
    with seeded(seed):
        return model(
            config(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                initializer_range=SPREAD,
                pad_token_id=0,
                **keywords,
            )
        )


def gemma(seed: int, layers: int) -> Any:
    """Its logits are capped softly (at 2, so that it shows), and its head is its embedding."""
    further = {"head_dim": 4, "final_logit_softcapping": 2.0}
    return _decoder(transformers.Gemma2Config, transformers.Gemma2ForCausalLM, seed, layers, **further)


def granite(seed: int, layers: int) -> Any:
    """Its logits are divided by 3."""
    return _decoder(transformers.GraniteConfig, transformers.GraniteForCausalLM, seed, layers, logits_scaling=3.0)


def cohere(seed: int, layers: int) -> Any:
    """Its logits are multiplied by 0.4."""
    return _decoder(transformers.CohereConfig, transformers.CohereForCausalLM, seed, layers, logit_scale=0.4)


FAMILIES: dict[str, tuple[str, Callable[[int, int], Any]]] = {
    "llama": ("llama", llama),
    "gpt2": ("gpt2", gpt2),
    "bert_mlm": ("bert_mlm", KINDS["bert_mlm"].model),
    "t5": ("t5", KINDS["t5"].model),
    "gemma": ("llama", gemma),
    "granite": ("llama", granite),
    "cohere": ("llama", cohere),
}
"""By family: the kind that has its data, and its models."""


class BentForCausalLM(transformers.LlamaForCausalLM):
    """Does something behind its head that no configuration names."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().forward(*args, **kwargs)
        returned.logits = returned.logits * torch.linspace(1, 2, returned.logits.shape[-1])
        return returned


def distiller(kind: str, student: Any, teacher: Any, padding: Padding | None = None, **keywords: Any) -> Any:
    ours = ("soft_loss_fn", "soft_loss_fn_kwargs", "output_head_layer")
    own = {name: keywords.pop(name) for name in ours if name in keywords}
    arguments = {
        "max_steps": 4,
        "optim": "sgd",
        "learning_rate": 0.5,
        "remove_unused_columns": False,
        "eval_strategy": "steps",
        "eval_steps": 2,
        **keywords,
    }
    return ResponseBasedDistiller(
        student,
        teacher,
        train_dataset=KINDS[kind].data(16, 1),
        eval_dataset=KINDS[kind].data(6, 2),
        data_collator=Collator(kind, padding) if padding else Collator(kind),
        args=training_arguments(silverspoon_ray, **arguments),
        **own,
    )


def run(family: str, **keywords: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], Any]:
    kind, model = FAMILIES[family]
    student, teacher = keywords.pop("student", None) or model(0, 1), keywords.pop("teacher", None) or model(5, 2)
    built = distiller(kind, student, teacher, **keywords)
    if keywords.pop("unfused", False):
        built.head = None
    return without_times(trained(built)), student.state_dict(), built


def in_full(family: str, **keywords: Any) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], Any]:
    """From logits, on both sides."""
    kind, model = FAMILIES[family]
    student, teacher = model(0, 1), model(5, 2)
    built = distiller(kind, student, teacher, **keywords)
    built.head = None
    return without_times(trained(built)), student.state_dict(), built


def same(left: tuple[Any, ...], right: tuple[Any, ...], rel: float = 1e-5) -> None:
    assert len(left[0]) == len(right[0])
    for one, other in zip(left[0], right[0], strict=True):
        assert one == pytest.approx(other, rel=rel, abs=1e-6)
    for key, value in left[1].items():
        torch.testing.assert_close(value, right[1][key], rtol=1e-4, atol=2e-6, msg=key)


WEIGHTINGS = {
    "distillation": {},
    "both": {"alpha": 0.3},
    "task": {"alpha": 1.0},
    "magnitudes": {"alpha": 0.3, "magnitude_aware_weighting": True},
    "magnitude": {"magnitude_aware_weighting": True},
    "cut": {"alpha": 0.3, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
}


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["full", "hidden"])
def test_hidden_is_full_and_fused_is_not(form: str, family: str, weighting: str) -> None:
    """Same curves, same student, in training and evaluation; whether the student's logits are held or not."""
    expected = in_full(family, **WEIGHTINGS[weighting])
    got = run(family, teacher_logits=form, **WEIGHTINGS[weighting])
    same(got, expected)
    expects_head = family != "t5" or "alpha" not in WEIGHTINGS[weighting]
    assert (got[2].head is not None) is expects_head


@pytest.mark.parametrize("loss", [("kl_divergence", 2.0), ("reverse_kl", 0.5), ("jsd", 1.0)])
@pytest.mark.parametrize("form", ["hidden", "top_k"])
def test_divergences(form: str, loss: tuple[str, float]) -> None:
    """With k = V nothing is lost."""
    soft = {"soft_loss_fn": loss[0], "soft_loss_fn_kwargs": {"temperature": loss[1]}}
    # Of log-probabilities in which a class is impossible, and with float32 sums in another order.
    same(run("llama", teacher_logits=form, teacher_top_k=VOCABULARY, **soft), in_full("llama", **soft), rel=1e-4)


@pytest.mark.parametrize("loss", ["kl_divergence", "reverse_kl", "jsd"])
def test_top_k_is_a_lower_bound(loss: str) -> None:
    full = in_full("llama", soft_loss_fn=loss)[0][0]["loss"]
    values = [
        run("llama", soft_loss_fn=loss, teacher_logits="top_k", teacher_top_k=k)[0][0]["loss"] for k in (2, 8, 32)
    ]
    assert 0 < values[0] < values[1] < values[2] < full


def test_sampled_converges() -> None:
    """The more draws, the nearer; and each estimate is of the full loss, not of a part of it."""
    full = in_full("llama")[0][0]["loss"]
    errors = [
        abs(run("llama", teacher_logits="sampled", teacher_top_k=draws)[0][0]["loss"] - full) / full
        for draws in (4, 64, 4096)
    ]
    assert errors[0] > errors[2]
    assert errors[1] < 0.2
    assert errors[2] < 5e-3


CUTS = {
    "2 x 2": ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, None),
    "1 x 4": ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, None),
    "longer": ({}, Padding("right", 5, 3)),
    "left": ({}, Padding("left", 2, 7)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("form", ["sampled", "top_k"])
def test_draws_belong_to_samples(form: str, cut: str) -> None:
    """Not to batches, nor to padding: the same classes are drawn for a sample however it is batched."""
    keywords, padding = CUTS[cut]
    settings = {"teacher_logits": form, "teacher_top_k": 12, "alpha": 0.2, "eval_strategy": "no"}
    got = run("llama", padding=padding, **settings, **keywords)
    # Sampling is not continuous: a draw next to a boundary may fall to the neighbour when the last bit differs.
    same(got, run("llama", **settings), rel=1e-3)


def test_seeds() -> None:
    """The seed of the run decides the draws; two calls give one answer."""
    teacher = LocalTeacher(llama(5, 2))
    batch = {"input_ids": torch.arange(1, 25).view(2, 12)}
    first, again, other = (
        teacher.answer(batch, TeacherRequest(logits="sampled", top_k=12, seed=seed)).soft_targets["indices"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("padded", ["teacher", "student"])
@pytest.mark.parametrize("form", ["full", "hidden", "top_k", "sampled"])
def test_padded_vocabularies(form: str, padded: str) -> None:
    """One of the two has a class more, whose probability is not small: it is never compared."""
    small, large = VOCABULARY, VOCABULARY + 1

    def model(seed: int, layers: int, vocabulary: int) -> Any:
        built = llama(seed, layers)
        if vocabulary > VOCABULARY:
            built.resize_token_embeddings(vocabulary, mean_resizing=False)
            with torch.no_grad():
                built.lm_head.weight[-1] = built.lm_head.weight[3] * 3
        return built

    sizes = (large, small) if padded == "teacher" else (small, large)
    built = [
        distiller(
            "llama",
            model(0, 1, sizes[1]),
            model(5, 2, sizes[0]),
            teacher_logits=name,
            teacher_top_k=VOCABULARY if name == "top_k" else 4096,
            alpha=0.3,
        )
        for name in (form, "full")
    ]
    built[1].head = None
    got, expected = (without_times(trained(one)) for one in built)
    assert got[0] == pytest.approx(expected[0], rel=2e-2 if form == "sampled" else 1e-4)
    assert built[0].head is not None


class Largest(TorchDispatchMode):
    """The most rows of any tensor that is as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = function(*args, **(kwargs or {}))
        for tensor in returned if isinstance(returned, tuple | list) else [returned]:
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 0 and tensor.shape[-1] == 4096:
                self.rows = max(self.rows, tensor.numel() // 4096)
        return returned


@pytest.mark.parametrize("form", ["hidden", "top_k", "sampled"])
def test_no_tensor_of_all_logits(form: str) -> None:
    """1024 tokens x 4096 classes: neither in the student's forward nor in its loss nor in the backward."""
    with seeded(0):
        config = transformers.LlamaConfig(
            vocab_size=4096,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
        student, teacher = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    data = [{"input_ids": torch.arange(512) + 5, "labels": torch.arange(512) + 5}] * 4
    args = training_arguments(
        silverspoon_ray, teacher_logits=form, alpha=0.5, max_steps=1, per_device_train_batch_size=2, optim="sgd"
    )
    built = ResponseBasedDistiller(student, teacher, train_dataset=data, eval_dataset=data, args=args)
    batch = {key: torch.stack([row[key] for row in data[:2]]) for key in data[0]}
    answer = LocalTeacher(teacher).answer({"input_ids": batch["input_ids"]}, built.stream_request)
    targets = built.reader.targets(answer)
    with Largest() as seen:
        hidden = built._student_without_head(student, batch)
        terms = built._fused_terms(hidden, targets, batch, batch, Ticket(), True)
        terms["soft"].carrier.backward()
    assert student.lm_head.weight.grad.abs().sum() > 0
    assert 0 < seen.rows < 1024


@pytest.mark.parametrize("weighting", ["distillation", "both", "magnitudes"])
def test_a_batch_that_is_there_twice_counts_nothing(weighting: str) -> None:
    """As the last of an epoch, on a rank that has no samples of its own left."""
    student = llama(0, 1)
    built = distiller("llama", student, llama(5, 2), **WEIGHTINGS[weighting])
    batch = Collator("llama")(KINDS["llama"].data(4, 1))
    count = torch.tensor(10)
    for repeated in (False, True):
        student.zero_grad()
        ticket = Ticket(items={"soft": count, "task": count}, repeated=repeated)
        loss = built.compute_loss(student, {**batch, TICKET_KEY: ticket})
        loss.backward()
        gradients = [p.grad for p in student.parameters() if p.grad is not None]
        assert all(not gradient.any() for gradient in gradients) is repeated
        assert (loss == 0) == repeated


# ---- heads that are more than a linear layer ----------------------------------------------------------------


def bent(seed: int, layers: int) -> Any:
    return _decoder(transformers.LlamaConfig, BentForCausalLM, seed, layers)


def test_a_teacher_that_does_more_is_refused() -> None:
    built = distiller("llama", llama(0, 1), bent(5, 2), teacher_logits="hidden")
    with pytest.raises(ConfigError, match="does more behind its lm_head"):
        trained(built)


def test_a_student_that_does_more_is_computed_in_full(caplog: pytest.LogCaptureFixture) -> None:
    student = bent(0, 1)
    built = distiller("llama", student, llama(5, 2), alpha=0.2, teacher_logits="hidden")
    with caplog.at_level(logging.WARNING):
        history = without_times(trained(built))
    assert "does more behind its lm_head" in caplog.text
    assert built.head is None
    expected = bent(0, 1)
    unfused = distiller("llama", expected, llama(5, 2), alpha=0.2)
    unfused.head = None
    same((history, student.state_dict()), (without_times(trained(unfused)), expected.state_dict()))


@pytest.mark.parametrize("wrapped", [True, False])
def test_lora(wrapped: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A wrapped head is computed in full, and says so; a frozen one is fused."""
    peft = pytest.importorskip("peft")
    target = ["q_proj", "lm_head"] if wrapped else ["q_proj"]

    def student() -> Any:
        with seeded(3):
            return peft.get_peft_model(llama(0, 1), peft.LoraConfig(r=2, target_modules=target, lora_dropout=0.0))

    with caplog.at_level(logging.INFO):
        got = run("llama", student=student(), teacher_logits="hidden", alpha=0.2)
    assert (got[2].head is None) is wrapped
    assert ("no plain linear output head" in caplog.text) is wrapped
    full = distiller("llama", student(), llama(5, 2), alpha=0.2)
    full.head = None
    history = without_times(trained(full))
    same(got, (history, full.model.state_dict()))


def test_a_head_that_is_named() -> None:
    """A plain module, whose head nobody could find."""
    kind = KINDS["perceptron"]
    student, teacher = kind.model(0, 1), kind.model(5, 2)
    twin = copy.deepcopy(student)
    built = distiller("perceptron", student, teacher, output_head_layer="layers.2")
    history = without_times(trained(built))
    assert built.head is not None
    same(
        (history, student.state_dict()),
        (without_times(trained(distiller("perceptron", twin, teacher))), twin.state_dict()),
    )


# ---- what cannot be ----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "classifier": (
        lambda: distiller("bert_classifier", bert_classifier(0, 1), bert_classifier(5, 2), teacher_logits="hidden"),
        "teacher_logits",
        "no linear output head",
    ),
    "own loss": (
        lambda: distiller("llama", llama(0, 1), llama(5, 2), teacher_logits="top_k", soft_loss_fn=mean_squared),
        "teacher_logits",
        "soft_loss_fn of your own",
    ),
    "sampled jsd": (
        lambda: distiller("llama", llama(0, 1), llama(5, 2), teacher_logits="sampled", soft_loss_fn="jsd"),
        "teacher_logits",
        "forward KL",
    ),
    "sampled reverse": (
        lambda: distiller("llama", llama(0, 1), llama(5, 2), teacher_logits="sampled", soft_loss_fn="reverse_kl"),
        "teacher_logits",
        "forward KL",
    ),
    "features": (
        lambda: HolisticDistiller.check_arguments(training_arguments(silverspoon_ray, teacher_logits="hidden")),
        "teacher_logits",
        "does not compare logits",
    ),
    "no head of that name": (
        lambda: distiller("llama", llama(0, 1), llama(5, 2), output_head_layer="lm_hed"),
        "output_head_layer",
        "lm_head",
    ),
    "no linear layer": (
        lambda: distiller("llama", llama(0, 1), llama(5, 2), output_head_layer="model.norm"),
        "output_head_layer",
        "LlamaRMSNorm",
    ),
    "form": (
        lambda: distiller("llama", llama(0, 1), llama(5, 2), teacher_logits="topk"),
        "teacher_logits",
        "top_k",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    build, key, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said) as refused:
        build()
    assert refused.value.key == key


def test_own_loss_from_hidden_states() -> None:
    """A user's own callable gets logits in full, made of what travelled."""
    got = run("llama", teacher_logits="hidden", soft_loss_fn=mean_squared)
    same(got, in_full("llama", soft_loss_fn=mean_squared))
