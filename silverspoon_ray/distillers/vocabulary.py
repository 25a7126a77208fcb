"""Do the vocabularies of teacher and student belong together?"""

from __future__ import annotations

from typing import Any

from silverspoon_ray.errors import VocabularyError

# Padding a vocabulary to a multiple of 64 to 1024 adds well under this share of the entries of a real tokenizer.
PADDING_SHARE = 0.02


def vocabulary_size(config: Any) -> int | None:
    """The width of the logits that a configuration describes; None where it does not say."""
    if config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) else None


def check_vocabularies(teacher: Any, student: Any, tokens: int | None = None) -> None:
    """Refuse two configurations whose logits cannot be compared; those that do not say are let through.

    Args:
        teacher, student: configurations, or None.
        tokens: the size of their common tokenizer, where it is known.

    Raises:
        VocabularyError: see :func:`common_vocabulary`.
    """
    teacher_size, student_size = vocabulary_size(teacher), vocabulary_size(student)
    if teacher_size is not None and student_size is not None:
        common_vocabulary(teacher_size, student_size, tokens)


def speaks_tokens(config: Any) -> bool:
    """Whether the configuration is one of a language model, whose logits are over its vocabulary."""
    names = getattr(config, "architectures", None) or [""]
    return names[0].endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration"))


def common_vocabulary(teacher: int, student: int, tokens: int | None = None) -> int:
    """How many leading entries of the logits mean the same token for both.

    Models are often trained with a vocabulary that is padded beyond its tokenizer (Qwen: 151936 and 152064 for the
    same one). Such padding is cut off. Two vocabularies of really different sizes cannot be compared position by
    position.

    Args:
        teacher, student: widths of the logits.
        tokens: the size of their common tokenizer, where it is known; it then decides alone.

    Raises:
        VocabularyError: the sizes do not differ by padding.
    """
    smaller, larger = sorted((teacher, student))
    if smaller == larger:
        return smaller
    if tokens is not None:
        if tokens <= smaller:
            return smaller
        raise VocabularyError(
            "vocab_size",
            (teacher, student),
            f"teacher and student that both hold the tokenizer's {tokens} tokens; one has only {smaller}",
        )
    if larger - smaller <= PADDING_SHARE * larger:
        return smaller
    raise VocabularyError(
        "vocab_size",
        (teacher, student),
        "teacher and student with the same tokenizer; sizes this far apart are no padding. If it is the same "
        "tokenizer, pass it as processing_class",
    )
