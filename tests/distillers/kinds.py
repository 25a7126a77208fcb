"""Kinds of students with their teachers and data, and what distillation means for each, written down without a batch.

Every kind gives the rows of logits that count for *one sample alone*: no padding, no mask, no collator. Whatever a
distiller computes from padded and cut batches must be what :func:`reference_steps` computes from those in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from tests.support import VOCABULARY, Perceptron, seeded

# Wide enough that teacher and student differ clearly and gradients are far above rounding.
SPREAD = 0.15
CLASSES = 5
Sample = dict[str, Any]
Rows = tuple[torch.Tensor, torch.Tensor]
"""Logits ``[n, classes]`` and targets ``[n]`` of the rows that count."""


@dataclass(frozen=True)
class Kind:
    """A kind of student.

    Attributes:
        model: ``(seed, layers) -> model`` without dropout.
        data: ``(samples, seed) -> samples`` of different lengths, some labels of which do not count.
        rows: ``(model, sample) -> Rows`` of one sample alone.
        fill: what padding is made of, by key; empty: nothing is padded.
        padded_left: the keys that may be padded on the left.
        losses: the soft losses to use.
    """

    model: Callable[[int, int], torch.nn.Module]
    data: Callable[[int, int], list[Sample]]
    rows: Callable[[torch.nn.Module, Sample], Rows]
    fill: dict[str, int]
    padded_left: tuple[str, ...] = ()
    positions: bool = False


# ---- models ------------------------------------------------------------------------------------------------


def llama(seed: int, layers: int) -> torch.nn.Module:
    with seeded(seed):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                initializer_range=SPREAD,
                pad_token_id=0,
            )
        )


def gpt2(seed: int, layers: int, dropout: float = 0.0) -> torch.nn.Module:
    with seeded(seed):
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=16,
                n_layer=layers,
                n_head=2,
                n_positions=64,
                initializer_range=SPREAD,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=0,
                eos_token_id=0,
            )
        )


def _bert_config(layers: int, **config: Any) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=SPREAD,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **config,
    )


def bert_mlm(seed: int, layers: int) -> torch.nn.Module:
    with seeded(seed):
        return BertForMaskedLM(_bert_config(layers))


def bert_classifier(seed: int, layers: int) -> torch.nn.Module:
    with seeded(seed):
        return BertForSequenceClassification(_bert_config(layers, num_labels=CLASSES))


def bert_regression(seed: int, layers: int) -> torch.nn.Module:
    with seeded(seed):
        return BertForSequenceClassification(_bert_config(layers, num_labels=1))


def t5(seed: int, layers: int) -> torch.nn.Module:
    with seeded(seed):
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=16,
                d_ff=32,
                d_kv=8,
                num_layers=layers,
                num_heads=2,
                decoder_start_token_id=0,
                pad_token_id=0,
                dropout_rate=0.0,
                initializer_factor=1.0,
            )
        )


def vit(seed: int, layers: int) -> torch.nn.Module:
    with seeded(seed):
        return ViTForImageClassification(
            ViTConfig(
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=layers,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
                num_channels=1,
                num_labels=CLASSES,
                initializer_range=SPREAD,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )


def perceptron(seed: int, layers: int) -> torch.nn.Module:
    return Perceptron(seed, width=8 * layers)


# ---- data --------------------------------------------------------------------------------------------------


def text(samples: int, seed: int = 1) -> list[Sample]:
    """Token sequences of 3 to 12; labels are masked at the front and here and there, in one sample all of them."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for index in range(samples):
        length = int(torch.randint(3, 13, (), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, length - 1, (), generator=generator))] = -100
        labels[torch.rand(length, generator=generator) < 0.2] = -100
        if index == 5:
            labels[:] = -100
        data.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return data


def translations(samples: int, seed: int = 1) -> list[Sample]:
    """Sources as in :func:`text`, targets of lengths of their own."""
    targets = text(samples, seed + 100)
    return [{**sample, "labels": target["labels"]} for sample, target in zip(text(samples, seed), targets, strict=True)]


def classified(samples: int, seed: int = 1) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    data = text(samples, seed)
    for index, sample in enumerate(data):
        sample["labels"] = torch.randint(0, CLASSES, (), generator=generator)
        if index % 7 == 3:
            sample["labels"] = torch.tensor(-100)
    return data


def measured(samples: int, seed: int = 1) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    return [{**sample, "labels": torch.randn((), generator=generator)} for sample in text(samples, seed)]


def images(samples: int, seed: int = 1) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    labels = [sample["labels"] for sample in classified(samples, seed)]
    return [{"pixel_values": torch.randn(1, 8, 8, generator=generator), "labels": label} for label in labels]


def vectors(samples: int, seed: int = 1) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    labels = [sample["labels"].clamp(max=3) for sample in classified(samples, seed)]
    return [{"x": torch.randn(6, generator=generator), "labels": label} for label in labels]


# ---- what counts -------------------------------------------------------------------------------------------


def causal_rows(model: Any, sample: Sample) -> Rows:
    logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1]
    targets = sample["labels"][1:]
    return logits[targets != -100], targets[targets != -100]


def masked_rows(model: Any, sample: Sample) -> Rows:
    logits = model(input_ids=sample["input_ids"][None]).logits[0]
    targets = sample["labels"]
    return logits[targets != -100], targets[targets != -100]


def translation_rows(model: Any, sample: Sample) -> Rows:
    targets = sample["labels"]
    shifted = torch.cat([torch.zeros(1, dtype=torch.long), targets[:-1]]).clamp(min=0)
    logits = model(input_ids=sample["input_ids"][None], decoder_input_ids=shifted[None]).logits[0]
    return logits[targets != -100], targets[targets != -100]


def class_rows(model: Any, sample: Sample) -> Rows:
    key, value = next((key, sample[key]) for key in ("input_ids", "pixel_values", "x") if key in sample)
    if value.is_floating_point():
        value = value.to(next(model.parameters()).dtype)
    returned = model(**{key: value[None]})
    logits = returned if isinstance(returned, torch.Tensor) else returned.logits
    targets = sample["labels"][None]
    counted = torch.ones_like(targets, dtype=torch.bool) if targets.is_floating_point() else targets != -100
    return logits[counted], targets[counted]


TOKENS = {"input_ids": 0, "attention_mask": 0, "labels": -100}
INPUTS = {"input_ids": 0, "attention_mask": 0}
KINDS = {
    "llama": Kind(llama, text, causal_rows, TOKENS, tuple(TOKENS), positions=True),
    "gpt2": Kind(gpt2, text, causal_rows, TOKENS, tuple(TOKENS), positions=True),
    "bert_mlm": Kind(bert_mlm, text, masked_rows, TOKENS, tuple(TOKENS), positions=True),
    # The decoder sees what is before a target, so only the source can be padded on the left.
    "t5": Kind(t5, translations, translation_rows, TOKENS, tuple(INPUTS)),
    "bert_classifier": Kind(bert_classifier, classified, class_rows, INPUTS),
    "vit": Kind(vit, images, class_rows, {}),
    "perceptron": Kind(perceptron, vectors, class_rows, {}),
    "bert_regression": Kind(bert_regression, measured, class_rows, INPUTS),
}


FURTHER: dict[str, Kind] = {}
"""Kinds that only some test files use: what is parametrised over KINDS does not know them."""


def kind_of(name: str) -> Kind:
    """The kind of that name, from both tables."""
    return KINDS[name] if name in KINDS else FURTHER[name]


@dataclass(frozen=True)
class Padding:
    """How batches are padded: the side, positions more than needed, and the token that padding is made of."""

    side: str = "right"
    extra: int = 0
    garbage: int = 0

    def __str__(self) -> str:
        return f"{self.side}+{self.extra}"


NO_PADDING = Padding()
"""Only as much as the longest sample of a batch asks for."""


class Collator:
    """Pads and stacks samples, and remembers the samples in the order in which they came."""

    def __init__(self, kind: str, padding: Padding = NO_PADDING) -> None:
        self.kind, self.padding = kind_of(kind), padding
        self.seen: list[Any] = []

    def __call__(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        self.seen += [sample.get("index") for sample in samples]
        batch = {}
        for key in samples[0]:
            if key == "index":
                continue
            rows = [sample[key] for sample in samples]
            batch[key] = torch.stack(self._padded(key, rows) if key in self.kind.fill else rows)
        if self.padding.side == "left" and self.kind.positions:
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return batch

    def _padded(self, key: str, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        longest = max(len(row) for row in rows) + self.padding.extra
        fill = self.padding.garbage if key == "input_ids" else self.kind.fill[key]
        left = self.padding.side == "left" and key in self.kind.padded_left
        return [F.pad(row, (longest - len(row), 0) if left else (0, longest - len(row)), value=fill) for row in rows]


def numbered(data: list[Sample]) -> list[Sample]:
    """The samples with their number, which a :class:`Collator` remembers."""
    return [{**sample, "index": index} for index, sample in enumerate(data)]


# ---- losses, by the book -----------------------------------------------------------------------------------


def kl(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Sum over rows of T^2 KL(teacher || student)."""
    student_log = torch.log_softmax(student / temperature, -1)
    teacher_log = torch.log_softmax(teacher / temperature, -1)
    return temperature**2 * (teacher_log.exp() * (teacher_log - student_log)).sum()


def reverse_kl(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return kl(teacher, student, temperature)


def jsd(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0, beta: float = 0.5) -> torch.Tensor:
    """Sum over rows of T^2 (beta KL(teacher || m) + (1 - beta) KL(student || m))."""
    p, q = torch.softmax(teacher / temperature, -1), torch.softmax(student / temperature, -1)
    m = beta * p + (1 - beta) * q
    divergence = beta * (p * (p / m).log()).sum() + (1 - beta) * (q * (q / m).log()).sum()
    return temperature**2 * divergence


def squared(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return (student - teacher).square().sum()


def mean_squared(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """A user's own loss: a mean, without ``mask`` and ``num_items``."""
    return (student - teacher).square().mean()


SOFT = {"kl_divergence": kl, "reverse_kl": reverse_kl, "jsd": jsd, mean_squared: squared}


def task(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum over rows of the loss on the labels."""
    if targets.is_floating_point():
        return (logits[:, 0] - targets).square().sum()
    return F.cross_entropy(logits, targets, reduction="sum")


def batch_losses(
    kind: Kind,
    student: torch.nn.Module,
    teacher: torch.nn.Module,
    samples: Iterable[Sample],
    soft: Callable[..., torch.Tensor],
    **keywords: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Soft and hard loss of a batch: sums over what counts in all samples, divided by how much that is."""
    pairs = []
    for sample in samples:
        with torch.no_grad():
            teacher_logits, _ = kind.rows(teacher, sample)
        pairs.append((*kind.rows(student, sample), teacher_logits))
    student_rows = torch.cat([pair[0] for pair in pairs])
    targets = torch.cat([pair[1] for pair in pairs])
    teacher_rows = torch.cat([pair[2] for pair in pairs])
    count = max(len(targets), 1)
    return soft(student_rows, teacher_rows, **keywords) / count, task(student_rows, targets) / count


def reference_steps(
    kind: Kind,
    steps: Iterable[list[Sample]],
    alpha: float,
    soft: Callable[..., torch.Tensor],
    learning_rate: float,
    seeds: tuple[int, int] = (0, 5),
    **keywords: float,
) -> tuple[list[tuple[float, float, float]], dict[str, torch.Tensor]]:
    """Plain SGD in float64.

    Returns:
        (total, soft, hard) of each step, and the student's parameters after the last.
    """
    student = copy.deepcopy(kind.model(seeds[0], 1)).double()
    teacher = copy.deepcopy(kind.model(seeds[1], 2)).double().eval()
    losses = []
    for samples in steps:
        soft_loss, hard_loss = batch_losses(kind, student, teacher, samples, soft, **keywords)
        total = (1 - alpha) * soft_loss + alpha * hard_loss
        parameters = list(student.parameters())
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter -= learning_rate * gradient
        losses.append((total.item(), soft_loss.item(), hard_loss.item()))
    return losses, dict(student.named_parameters())
