"""Teachers behind a cache: what they are asked is counted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.cache.entries import ENCODER
from silverspoon_ray.teacher.cache.teacher import CachedTeacher
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest
from tests.distillers.kinds import KINDS, Collator, Padding

LAYERS = {
    "llama": ("model.layers.1", "model.layers.0.self_attn.q_proj", "model.norm"),
    "gpt2": ("transformer.h.1", "transformer.h.0.mlp.c_fc", "transformer.ln_f"),
    "bert_mlm": ("bert.encoder.layer.1", "bert.encoder.layer.0.intermediate", "cls.predictions.transform"),
    "t5": ("encoder.block.1.layer.1", "decoder.block.1.layer.2", "decoder.final_layer_norm"),
    "vit": ("vit.layers.1", "vit.layers.0.mlp.fc1", "vit.layernorm"),
    "perceptron": ("layers.0", "layers.1", "layers.2"),
}


class Counting:
    """A local teacher that counts rows.

    Attributes:
        rows: of every batch that it was asked for.
        broken: every further question raises.
    """

    dedicated = True

    def __init__(self, model: torch.nn.Module) -> None:
        self.local = LocalTeacher(model.eval())
        self.structure = self.local.structure
        self.rows: list[int] = []
        self.broken = False

    def weight_digests(self) -> dict[str, str]:
        return self.local.weight_digests()

    def output_head(self) -> Any:
        return self.local.output_head()

    def open(self, request: TeacherRequest) -> Any:
        return _Stream(self, request)


class _Stream:
    def __init__(self, teacher: Counting, request: TeacherRequest) -> None:
        self.teacher, self.request = teacher, request

    def submit(self, batch: Mapping[str, Any]) -> Any:
        assert not self.teacher.broken, "the teacher was asked"
        rows = next(value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor))
        self.teacher.rows.append(rows)
        answer = _Answer()
        answer.output = self.teacher.local.answer(batch, self.request)
        return answer


class _Answer:
    nbytes = 1000
    output: TeacherOutput

    def ready(self) -> bool:
        return False

    def result(self) -> TeacherOutput:
        return self.output

    def release(self) -> None:
        self.output = TeacherOutput()


def names_of(kind: str, model: torch.nn.Module) -> tuple[str, ...]:
    """Modules to capture, those of them that the model has."""
    known = dict(model.named_modules())
    found = tuple(name for name in LAYERS[kind] if name in known)
    return found or tuple(name for name in list(known)[1:] if list(known[name].children()) == [])[:2]


def teacher_batch(kind: str, samples: list[Any], padding: Padding | None = None) -> dict[str, Any]:
    """What a teacher of this kind is asked."""
    batch = Collator(kind, padding or Padding())(samples)
    labels = batch.pop("labels")
    if kind == "t5":
        shifted = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], dim=1).clamp(min=0)
        batch["decoder_input_ids"] = shifted
        batch["decoder_attention_mask"] = (labels != -100).long().flip(1).cumsum(1).flip(1).clamp(max=1)
    return batch


def cached(uri: Path | str, kind: str, **keywords: Any) -> tuple[CachedTeacher, Counting]:
    inner = Counting(keywords.pop("model", None) or KINDS[kind].model(5, 2))
    return CachedTeacher(inner, str(uri), **keywords), inner


def answer(teacher: CachedTeacher, request: TeacherRequest, batch: dict[str, Any]) -> TeacherOutput:
    return teacher.open(request).submit(batch).result()


def real(output: TeacherOutput, batch: Mapping[str, Any]) -> TeacherOutput:
    """With zeros at padding, where a tensor has positions."""
    masks = [batch[name] for name in ("decoder_attention_mask", ENCODER) if name in batch]

    def at_real(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keep = (mask != 0).reshape(*mask.shape, *([1] * (tensor.dim() - 2)))
        return torch.where(keep, tensor, torch.zeros((), dtype=tensor.dtype))

    def cut(tensor: torch.Tensor, encoder: bool) -> torch.Tensor:
        if tensor.dim() < 3 or not masks:
            return tensor
        return at_real(tensor, masks[-1] if encoder else masks[0])

    return TeacherOutput(
        logits=None if output.logits is None else cut(output.logits, False),
        soft_targets={name: cut(value, False) for name, value in output.soft_targets.items()},
        outputs={
            n: map_tensors(lambda t, n=n: cut(t, n.startswith("encoder")), v)  # type: ignore[misc]
            for n, v in output.outputs.items()
        },
        inputs={
            n: map_tensors(lambda t, n=n: cut(t, n.startswith("encoder")), v)  # type: ignore[misc]
            for n, v in output.inputs.items()
        },
    )


def tensors_of(output: TeacherOutput) -> list[torch.Tensor]:
    """All tensors, in order."""
    found: list[torch.Tensor] = []
    output.map(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def same_bits(left: TeacherOutput, right: TeacherOutput) -> None:
    ours, theirs = tensors_of(left), tensors_of(right)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)


def close(left: TeacherOutput, right: TeacherOutput) -> None:
    for one, other in zip(tensors_of(left), tensors_of(right), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
