"""Who a teacher is: its configuration, and a fingerprint of its weights, however it was loaded or laid out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from silverspoon_ray.errors import CacheError
from silverspoon_ray.models.partial import read_part
from silverspoon_ray.models.source import ModelSource, build_model, known_structure

ELEMENTS = 256
"""How many elements of each tensor are looked at."""
PART_BYTES = 1 << 30
# Where it came from and how it is run; not what it computes.
INCIDENTAL = frozenset(
    {
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures"),
        *("dtype", "torch_dtype", "_attn_implementation", "attn_implementation"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
    }
)


@dataclass(frozen=True)
class TeacherIdentity:
    """A teacher's part of a manifest.

    Attributes:
        model: name of its class.
        config: hash of what its configuration says about its computation.
        weights: see :func:`fingerprint`.
        dtype: of its floating-point weights; several are joined with ``+``.
    """

    model: str
    config: str
    weights: str
    dtype: str


@runtime_checkable
class GivesWeightDigests(Protocol):
    """A teacher that can say what its weights are."""

    def weight_digests(self) -> dict[str, str]:
        """Of every tensor in its ``state_dict``, see :func:`tensor_digest`."""


def teacher_identity(teacher: Any) -> TeacherIdentity:
    """Who a :class:`~silverspoon_ray.teacher.protocol.Teacher` is.

    Raises:
        CacheError: it gives no digests of its weights.
    """
    known = getattr(teacher, "identity", None)
    if isinstance(known, TeacherIdentity):
        return known
    if not isinstance(teacher, GivesWeightDigests):
        expected = f"None, or a teacher with weight_digests(); a {type(teacher).__name__} does not say what it is"
        raise CacheError("teacher_cache", type(teacher).__name__, expected)
    return identity_of(teacher.structure, teacher.weight_digests())  # type: ignore[attr-defined]


def identity_of(structure: nn.Module, digests: Mapping[str, str]) -> TeacherIdentity:
    """From a model's structure and the digests of its tensors."""
    floating = {digest.split(":")[0] for digest in digests.values()}
    floating = {name for name in floating if "float" in name} or floating
    return TeacherIdentity(
        type(structure).__name__, config_hash(structure), fingerprint(digests), "+".join(sorted(floating))
    )


def config_hash(structure: nn.Module) -> str:
    """Of a transformers configuration; of the modules' own descriptions where there is none."""
    config: Any = getattr(structure, "config", None)
    if not hasattr(config, "to_dict"):
        return hashlib.blake2b(repr(structure).encode(), digest_size=16).hexdigest()
    content = json.dumps(_without_incidental(config.to_dict()), sort_keys=True, default=str)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _without_incidental(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _without_incidental(v) for k, v in value.items() if k not in INCIDENTAL}
    return [_without_incidental(item) for item in value] if isinstance(value, list | tuple) else value


def fingerprint(digests: Mapping[str, str]) -> str:
    """One hash of all tensors' digests, in the order of their names.

    It sees a tensor that has another name, shape or dtype, and another value in any of the :data:`ELEMENTS` places that
    are looked at (all, in smaller tensors). It cannot see a change that touches none of those: two fine-tuned models
    differ in almost every element, but a model in which a few single weights were edited by hand may pass for the
    original.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(digests):
        digest.update(f"{name}={digests[name]};".encode())
    return digest.hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """``dtype:hash`` of its shape and of a fixed choice of its elements: the first, the last, and evenly between."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()  # all ranks come by here together
    dtype, count = str(tensor.dtype).removeprefix("torch."), tensor.numel()
    digest = hashlib.blake2b(f"{dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    if tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)  # float8 can hardly be indexed
    if count:
        chosen = torch.arange(min(count, ELEMENTS), device=tensor.device)
        if count > ELEMENTS:
            chosen = chosen * (count - 1) // (ELEMENTS - 1)
        if tensor.is_contiguous():
            values = tensor.view(-1)[chosen]
        else:
            values = tensor[torch.unravel_index(chosen, tensor.shape)]
        digest.update(values.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return f"{dtype}:{digest.hexdigest()}"


def digests_of(model: nn.Module, own: Iterable[str] | None = None) -> dict[str, str]:
    """By name in the ``state_dict``; a tied tensor counts under each of its names, as it does in every other layout.

    Args:
        model: tensors on the meta device are left out.
        own: only these names.
    """
    chosen = None if own is None else set(own)
    return {
        name: tensor_digest(tensor)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta" and (chosen is None or name in chosen)
    }


def source_digests(source: ModelSource, **load_kwargs: Any) -> dict[str, str]:
    """The digests that the loaded model has, without holding more than a gigabyte of it where that can be avoided.

    From a directory of safetensors tensors are read part by part. Anything else is built first.

    Args:
        source: where the model comes from.
        load_kwargs: as for ``from_pretrained``.
    """
    if isinstance(source, nn.Module):
        return digests_of(source)
    structure = known_structure(source)
    digests: dict[str, str] = {}
    for part in _parts(structure) if structure is not None else [set[str]()]:
        model = read_part(source, part, torch.device("cpu"), **load_kwargs) if part else None
        if model is None:
            return digests_of(build_model(source, "teacher", **load_kwargs))
        digests |= digests_of(model, part)
    return digests


def _parts(structure: nn.Module) -> list[set[str]]:
    parts: list[set[str]] = [set()]
    size = 0
    for name, tensor in structure.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        size += tensor.numel() * tensor.element_size()
        if size > PART_BYTES and parts[-1]:
            parts.append(set())
            size = tensor.numel() * tensor.element_size()
        parts[-1].add(name)
    return parts
