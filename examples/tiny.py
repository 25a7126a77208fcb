"""Tiny models and data for the examples."""

from __future__ import annotations

import torch
import transformers


def llama(width: int, layers: int, seed: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=384,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )


def make_teacher() -> transformers.LlamaForCausalLM:
    return llama(64, 4, seed=0)


def make_student() -> transformers.LlamaForCausalLM:
    return llama(32, 2, seed=1)


def make_data(samples: int = 128) -> list[dict[str, torch.Tensor]]:
    """Sentences of the standard library's documentation as bytes."""
    from pydoc_data.topics import topics

    tokens = torch.tensor(list("".join(topics.values()).encode()[: samples * 64])) + 3
    return [{"input_ids": row, "labels": row} for row in tokens.view(samples, 64)]
