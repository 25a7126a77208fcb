"""A teacher over several processes of one group: tensor parallel, or sharded (FSDP2)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.source import ModelSource, architecture_class
from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest


def check_tensor_parallel(structure: nn.Module | None, num_devices: int) -> None:
    """Refuse what cannot be laid out tensor parallel, without loading it.

    Args:
        structure: the model on the meta device; None where it is not known yet.
        num_devices: the size of the group.

    Raises:
        ConfigError: a model without a plan, or one whose heads or widths the number does not divide.
    """
    if structure is None:
        raise ConfigError(
            "teacher_placement.strategy", "tp", '"pp" or "sharded"; tp loads a directory or hub id, part by part'
        )
    config = getattr(structure, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    if not getattr(text, "base_model_tp_plan", None) and not getattr(structure, "_tp_plan", None):
        raise ConfigError(
            "teacher_placement.strategy",
            "tp",
            f'"pp" or "sharded"; transformers has no tensor-parallel plan for {type(structure).__name__}',
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        size = getattr(text, name, None)
        if isinstance(size, int) and size % num_devices:
            raise ConfigError(
                "teacher_placement.num_devices", num_devices, f"a number that divides {name}={size} of the teacher"
            )


def load_tensor_parallel(source: ModelSource, num_devices: int, device: torch.device, **load_kwargs: Any) -> nn.Module:
    """Load this rank's part of a model by transformers' own tensor parallelism; the process group exists already."""
    path = os.path.expanduser(os.fspath(source))  # type: ignore[arg-type]
    model_class = architecture_class(transformers.AutoConfig.from_pretrained(path), path)
    distributed = transformers.DistributedConfig(tp_size=num_devices)
    model: nn.Module = model_class.from_pretrained(path, distributed_config=distributed, **load_kwargs)
    return model.to(device).eval()


def shard_over_ranks(
    model: nn.Module, wrap: str | Sequence[str] | None, num_devices: int, device: torch.device
) -> nn.Module:
    """Spread a model's parameters over the ranks of the process group; they are gathered layer by layer as it runs.

    That is FSDP2's ``fully_shard``. Ranks have to run their forwards in step.

    Args:
        model: whole, on the CPU; changed in place.
        wrap: class names of the modules that are gathered for themselves; None: the entries of every ``ModuleList``.
        num_devices: the size of the group.
        device: this rank's.

    Raises:
        ConfigError: no module has one of those names.
    """
    layers = layers_to_wrap(model, wrap)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    mesh = init_device_mesh(device.type, (num_devices,))
    for module in layers:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.eval()


def shard_local(teacher: Any, ranks: int, device: torch.device) -> None:
    """Spread a teacher that every student process holds over those processes; alone there is nothing to spread.

    Each rank asks it about its own batches. All ranks ask equally often, because parameters are gathered together.

    Args:
        teacher: a ``LocalTeacher``.
        ranks: the number of student processes.
        device: this one's.

    Raises:
        ConfigError: the teacher is not in this process, or is the student itself.
    """
    if not isinstance(teacher, LocalTeacher):
        raise ConfigError(
            "teacher_placement", "sharded", "None for a TeacherGroup's handle: its placement says how it is laid out"
        )
    if ranks == 1:
        return
    teacher.structure  # noqa: B018  (remembered as it is in one piece)
    shard_over_ranks(teacher.model, None, ranks, device)


def gathered(answer: TeacherOutput, model: nn.Module, request: TeacherRequest, ranks: int) -> TeacherOutput:
    """Put tensors together of which tensor parallelism left this rank a part.

    Where a layer's weight is spread over ranks by its outputs, or by its inputs, so is what it gives, or gets.

    Args:
        answer: this rank's, on its device.
        model: the teacher's part.
        request: what was asked for.
        ranks: the size of the group. All ranks call this in step.

    Raises:
        ConfigError: a module that lies between two split layers and has no split weight of its own.
    """

    for name in (*request.outputs, *request.inputs):
        _refuse_between(model, name)

    def whole(tensor: torch.Tensor, name: str, dim: int) -> torch.Tensor:
        weight = getattr(model.get_submodule(name), "weight", None)
        if not isinstance(weight, DTensor) or not any(p.is_shard(dim) for p in weight.placements):
            return tensor
        if tensor.shape[-1] * ranks != weight.shape[dim]:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(ranks)]
        torch.distributed.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=-1)

    for name in request.outputs:
        answer.outputs[name] = map_tensors(lambda t, name=name: whole(t, name, 0), answer.outputs[name])  # type: ignore[misc]
    for name in request.inputs:
        answer.inputs[name] = map_tensors(lambda t, name=name: whole(t, name, 1), answer.inputs[name])  # type: ignore[misc]
    return answer


def _refuse_between(model: nn.Module, name: str) -> None:
    """What lies between two split layers, an activation say, holds a part of each row that nothing says how to join."""
    parent = name.rpartition(".")[0]
    module = model.get_submodule(name)
    inside_a_layer = any(part.isdigit() for part in parent.split("."))
    beside = [child for child in model.get_submodule(parent).children() if isinstance(child, nn.Linear)]
    split = any(isinstance(child.weight, DTensor) for child in beside)
    if inside_a_layer and split and not isinstance(getattr(module, "weight", None), DTensor):
        raise ConfigError(
            "modules", name, f"{parent} or one of its linear layers; with strategy 'tp' its parts cannot be joined"
        )


def layers_to_wrap(model: nn.Module, wrap: str | Sequence[str] | None) -> list[nn.Module]:
    """The modules that ``wrap_cls`` means, outermost first and none within another."""
    if wrap is None:
        found = [child for m in model.modules() if isinstance(m, nn.ModuleList) for child in m]
    else:
        names = {wrap} if isinstance(wrap, str) else set(wrap)
        found = [module for module in model.modules() if type(module).__name__ in names]
        if not found:
            known = sorted({type(module).__name__ for module in model.modules()})
            raise ConfigError("teacher_placement.wrap_cls", wrap, f"class names out of {', '.join(known)}")
    inner = {id(m) for module in found for m in module.modules() if m is not module}
    return [module for module in found if id(module) not in inner]


MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")


def rows_of(batch: Mapping[str, Any]) -> int:
    """Samples in a batch: the length of its main input, or of the longest tensor."""
    lengths = {k: v.shape[0] for k, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
    return next((lengths[key] for key in MAIN_INPUTS if key in lengths), max(lengths.values(), default=1))


def own_rows(batch: Mapping[str, Any], rank: int, ranks: int) -> tuple[dict[str, Any], int]:
    """This rank's part of a batch, and how many of its rows are its own.

    All ranks get as many rows, because they gather parameters together; where rows run out the last is repeated.
    """
    rows = rows_of(batch)
    each = -(-rows // ranks)
    start = min(rank * each, rows)
    real = min(each, rows - start)
    index = torch.arange(start, start + each).clamp(max=rows - 1)

    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows:
            return value[index.to(value.device)]
        return value

    return {key: part(value) for key, value in batch.items()}, real
