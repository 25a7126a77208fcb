"""Teachers 64 wide with 4 heads and students 48 wide with 6, whose blocks need projectors on both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from tests.distillers.kinds import images
from tests.support import VOCABULARY, seeded, token_data

TEACHER, STUDENT = (64, 4), (48, 6)
SPREAD = 0.1


def llama(width: int, heads: int, layers: int) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=64,
            initializer_range=SPREAD,
            pad_token_id=0,
        )
    )


def gpt2(width: int, heads: int, layers: int) -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            n_positions=64,
            initializer_range=SPREAD,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bert(width: int, heads: int, layers: int) -> Any:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=64,
            initializer_range=SPREAD,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def vit(width: int, heads: int, layers: int) -> Any:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            image_size=8,
            patch_size=4,
            num_channels=1,
            num_labels=5,
            initializer_range=SPREAD,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5(width: int, heads: int, layers: int) -> Any:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=width,
            d_ff=2 * width,
            d_kv=width // heads,
            num_layers=layers,
            num_heads=heads,
            decoder_start_token_id=0,
            pad_token_id=0,
            dropout_rate=0.0,
        )
    )


@dataclass(frozen=True)
class WidthKind:
    """A kind of model.

    Attributes:
        make: ``(width, heads, layers) -> model``.
        modules: the alignments' patterns: blocks 1 and 2 of three, to blocks 0 and 1 of two.
        data: ``samples -> data``.
    """

    make: Callable[[int, int, int], Any]
    modules: dict[str, str]
    data: Callable[[int], list[dict[str, Any]]]

    def teacher(self) -> Any:
        with seeded(5):
            return self.make(*TEACHER, 3)

    def student(self, seed: int = 0) -> Any:
        with seeded(seed):
            return self.make(*STUDENT, 2)


WIDTHS = {
    "llama": WidthKind(llama, {r"model\.layers\.[12]": r"model\.layers\.[01]"}, token_data),
    "gpt2": WidthKind(gpt2, {r"transformer\.h\.[12]": r"transformer\.h\.[01]"}, token_data),
    "bert": WidthKind(bert, {r"bert\.encoder\.layer\.[12]": r"bert\.encoder\.layer\.[01]"}, token_data),
    "vit": WidthKind(vit, {r"vit\.layers\.[12]": r"vit\.layers\.[01]"}, images),
    "t5": WidthKind(t5, {r"(encoder|decoder)\.block\.[12]": r"\1\.block\.[01]"}, token_data),
}
