"""What of a training batch the teacher gets to see."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

# Targets and bookkeeping of the student's own loss. A teacher that received them would compute a loss nobody reads.
NEVER_SENT = frozenset({"labels", "label", "label_ids", "shift_labels", "num_items_in_batch", "return_loss"})


class TeacherInputs:
    """Picks what a teacher's ``forward`` accepts from a batch.

    Args:
        structure: the teacher's model (weights are not needed).
        label_names: further keys that are targets of the student.
    """

    def __init__(self, structure: nn.Module, label_names: Iterable[str] = ()) -> None:
        parameters = inspect.signature(structure.forward).parameters.values()
        self.takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self.accepted = frozenset(parameter.name for parameter in parameters)
        self.withheld = NEVER_SENT | frozenset(label_names)
        config = getattr(structure, "config", None)
        # A cache of keys and values would be filled and thrown away with every batch.
        takes_use_cache = "use_cache" in self.accepted or (self.takes_any and hasattr(config, "use_cache"))
        self.constants: dict[str, Any] = {"use_cache": False} if takes_use_cache else {}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The teacher's keyword arguments for ``batch``; the batch itself is left as it is."""
        chosen = {
            key: value
            for key, value in batch.items()
            if key not in self.withheld and value is not None and (self.takes_any or key in self.accepted)
        }
        return {**self.constants, **chosen}


def with_decoder_inputs(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with ``decoder_input_ids`` where an encoder-decoder model would make them from the labels.

    Whoever gets no labels needs them made: the teacher, and a student without a task loss.
    """
    if "labels" not in batch or "decoder_input_ids" in batch:
        return batch
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if make is None or not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return batch
    return {**batch, "decoder_input_ids": make(labels=batch["labels"])}
