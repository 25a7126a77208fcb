"""Tiny models and data for the tests; importable in Ray workers too."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 64
_SCRATCH = tempfile.TemporaryDirectory(prefix="silverspoon-test-", ignore_cleanup_errors=True)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def llama(seed: int = 0, width: int = 16, layers: int = 1, vocabulary: int = VOCABULARY, **config: Any) -> Any:
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        **config,
    }
    with seeded(seed):
        return LlamaForCausalLM(LlamaConfig(**settings))


def gpt2(seed: int = 0, width: int = 16, layers: int = 1, dropout: float = 0.1) -> Any:
    with seeded(seed):
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=width,
                n_layer=layers,
                n_head=2,
                n_positions=128,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=0,
                eos_token_id=0,
            )
        )


def _bert_config(width: int, layers: int, **config: Any) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=128,
        **config,
    )


def bert_mlm(seed: int = 0, width: int = 16, layers: int = 1) -> Any:
    with seeded(seed):
        return BertForMaskedLM(_bert_config(width, layers))


def bert_classifier(seed: int = 0, width: int = 16, layers: int = 1, **config: Any) -> Any:
    with seeded(seed):
        return BertForSequenceClassification(_bert_config(width, layers, **{"num_labels": 3, **config}))


def vit(seed: int = 0, width: int = 16, layers: int = 1) -> Any:
    with seeded(seed):
        config = ViTConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
            num_channels=1,
            num_labels=5,
        )
        return ViTForImageClassification(config)


def t5(seed: int = 0, width: int = 16, layers: int = 1) -> Any:
    with seeded(seed):
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=width,
                d_ff=2 * width,
                d_kv=8,
                num_layers=layers,
                num_heads=2,
                decoder_start_token_id=0,
                dropout_rate=0.0,
            )
        )


class Perceptron(torch.nn.Module):
    """A plain module: a tensor goes in, a tensor comes out."""

    def __init__(self, seed: int = 0, width: int = 8) -> None:
        super().__init__()
        with seeded(seed):
            self.layers = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def token_data(
    samples: int = 32, length: int = 16, seed: int = 1, vocabulary: int = VOCABULARY
) -> list[dict[str, Any]]:
    """Samples of one length, every token a label."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(samples):
        ids = torch.randint(1, vocabulary, (length,), generator=generator)
        data.append({"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)})
    return data


def ragged_data(samples: int = 32, seed: int = 1, low: int = 3, high: int = 17) -> list[dict[str, Any]]:
    """Samples of different lengths, some labels masked, as after masking a prompt."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(samples):
        length = int(torch.randint(low, high, (), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, length - 1, (), generator=generator))] = -100
        data.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return data


class Pad:
    """A collator for ragged samples.

    Args:
        side: where padding goes.
        extra: so many positions more than needed.
        garbage: the token that padding is made of.
    """

    def __init__(self, side: str = "right", extra: int = 0, garbage: int = 0) -> None:
        self.side, self.extra, self.garbage = side, extra, garbage

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples) + self.extra
        fill = {"input_ids": self.garbage, "labels": -100, "attention_mask": 0}
        batch = {}
        for key, value in fill.items():
            rows = []
            for sample in samples:
                pad = torch.full((longest - len(sample[key]),), value)
                parts = [pad, torch.as_tensor(sample[key])]
                rows.append(torch.cat(parts if self.side == "left" else parts[::-1]))
            batch[key] = torch.stack(rows)
        return batch


def training_arguments(module: Any, **keywords: Any) -> Any:
    """Arguments of silverspoon_ray or silverspoon_kd that log every step and save nothing."""
    defaults = {
        "output_dir": tempfile.mkdtemp(dir=_SCRATCH.name),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "seed": 0,
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
    }
    return module.TrainingArguments(**{**defaults, **keywords})


def trained(distiller: Any, **train: Any) -> list[dict[str, Any]]:
    """Train without printing; the history of logs."""
    distiller.remove_callback(PrinterCallback)
    distiller.train(**train)
    return distiller.state.log_history


UNTIMED = ("runtime", "per_second", "teacher/", "total_flos", "preparation_time")


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The history without what depends on the clock or on where the teacher runs."""
    return [{k: v for k, v in row.items() if not any(part in k for part in UNTIMED)} for row in history]
