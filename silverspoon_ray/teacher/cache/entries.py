"""From a batch's answer to an entry for each sample, without padding, and back into any other batch."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from silverspoon_ray.errors import CacheError
from silverspoon_ray.teacher.cache.place import KEY
from silverspoon_ray.teacher.content import MASKS, sample_keys
from silverspoon_ray.teacher.distributed import rows_of
from silverspoon_ray.teacher.protocol import TeacherOutput

DECODER_POSITIONS = "teacher_cache_decoder_positions"
"""The key under which a batch may say which of a decoder's positions matter, where it has no mask for them. Nobody but
the cache sees it."""
ENCODER, DECODER = MASKS["input_ids"], MASKS["decoder_input_ids"]
# Keywords that do not change what a teacher answers.
INCIDENTAL = frozenset({"use_cache"})
Bytes = Any
"""Bytes, or a NumPy array of them."""


@dataclass(frozen=True)
class Entry:
    """The answer for one sample.

    Attributes:
        spec: JSON of its structure; ``t`` stands for a tensor: dtype, shape, and the mask that cut its first dimension.
        data: the tensors' bytes, one behind the other.
    """

    spec: str
    data: Bytes


class Samples:
    """The samples of a batch: their keys, and where their real positions lie.

    Args:
        batch: the teacher's keyword arguments.
        whole: padding counts too, so it belongs to the content and nothing is cut.

    Raises:
        CacheError: an argument that cannot be a part of a key.
    """

    def __init__(self, batch: Mapping[str, Any], whole: bool = False) -> None:
        given = dict(batch)
        decoder_positions = given.pop(DECODER_POSITIONS, None)
        self.batch = given
        self.rows = rows_of(given)
        known = dict(given)
        if decoder_positions is not None and DECODER not in known and "decoder_input_ids" in known:
            known[DECODER] = decoder_positions
        if whole:  # a mask under another name is content like any other
            known = {f"padded {name}" if name in MASKS.values() else name: value for name, value in known.items()}
        self.masks = {} if whole else _masks(known, self.rows)
        context = _context(known, self.rows)
        self.keys = sample_keys(known, self.rows)
        if context:
            self.keys = [hashlib.blake2b(key + context, digest_size=16).digest() for key in self.keys]

    def bound(self, row: int) -> bytes:
        """A sample's key together with where its positions lie in this batch, for answers whose shape shows it."""
        digest = hashlib.blake2b(self.keys[row], digest_size=16)
        for name, mask in self.masks.items():
            digest.update(f"{name} {mask.shape[1]};".encode())
            digest.update(np.packbits(mask[row].numpy()).tobytes())
        return digest.digest()

    def part(self, rows: Sequence[int]) -> dict[str, Any]:
        """The batch with some of its rows, padded as it is."""
        if len(rows) == self.rows:
            return self.batch
        index = torch.tensor(rows)
        return {
            name: value[index.to(value.device)] if _has_rows(value, self.rows) else value
            for name, value in self.batch.items()
        }


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows


def _masks(batch: Mapping[str, Any], rows: int) -> dict[str, torch.Tensor]:
    """By name, which positions are real: boolean, on the CPU, ``[rows, positions]``."""
    masks = {}
    for tokens, name in MASKS.items():
        mask, ids = batch.get(name), batch.get(tokens)
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[0] == rows:
            masks[name] = mask.detach().cpu() != 0
        elif isinstance(ids, torch.Tensor) and ids.dim() >= 2 and not isinstance(mask, torch.Tensor):
            masks[name] = torch.ones(ids.shape[:2], dtype=torch.bool)
    return masks


def _context(batch: Mapping[str, Any], rows: int) -> bytes:
    """What all rows share, as a part of their keys."""
    digest = hashlib.blake2b(digest_size=16)
    some = False
    for name, value in sorted(batch.items()):
        if name in INCIDENTAL or value is None or _has_rows(value, rows):
            continue
        if isinstance(value, torch.Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            value = [str(value.dtype), list(value.shape), hashlib.blake2b(content).hexdigest()]
        try:
            digest.update(f"{name}={json.dumps(value, sort_keys=True)};".encode())
        except TypeError as error:
            expected = f"None, or teacher inputs of tensors, numbers and text; {name} is a {type(value).__name__}"
            raise CacheError(KEY, name, expected) from error
        some = True
    return digest.digest() if some else b""


# ---- from a batch to entries ---------------------------------------------------------------------------------


class Cutter:
    """Cuts answers into entries.

    Which of a tensor's dimensions goes over positions is read off its shape: the second, if it is as long as the batch
    is padded. Where a shape can be read in two ways, or shows the padding anywhere else, the entry is *bound*: good
    for batches that lay this sample out in the same way, and for no others.
    """

    def __init__(self) -> None:
        self._seen: dict[str, str | None] = {}

    def cut(self, answer: TeacherOutput, samples: Samples, rows: Sequence[int]) -> list[tuple[Entry, bool]]:
        """An entry for each of some rows, and whether it is bound.

        Args:
            answer: of ``samples.part(rows)``.
            samples: the whole batch.
            rows: which of its rows were asked for.

        Raises:
            CacheError: something in the answer does not belong to one sample each; it names the module.
        """
        leaves: list[tuple[torch.Tensor, str | None]] = []
        bound = False

        def take(value: Any, path: str) -> Any:
            nonlocal bound
            if isinstance(value, torch.Tensor):
                mask, is_bound = self._mask_of(value, path, samples, len(rows))
                bound = bound or is_bound
                leaves.append((value.detach().cpu().contiguous(), mask))
                return {"t": len(leaves) - 1}
            if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
                return {"d": {name: take(item, f"{path}.{name}") for name, item in value.items()}}
            if type(value) in (list, tuple):
                items = [take(item, f"{path}[{number}]") for number, item in enumerate(value)]
                return {"l" if isinstance(value, list) else "u": items}
            if value is None or isinstance(value, bool | int | float | str):
                return {"v": value}
            expected = f"None, or an output_selector for {path}: a {type(value).__name__} cannot be kept"
            raise CacheError(KEY, path, expected)

        tree = {
            "logits": take(answer.logits, "logits"),
            "soft_targets": take(answer.soft_targets, "soft_targets"),
            "outputs": take(answer.outputs, "outputs"),
            "inputs": take(answer.inputs, "inputs"),
        }
        return [(self._entry(tree, leaves, number, samples, row), bound) for number, row in enumerate(rows)]

    def _entry(
        self, tree: Any, leaves: list[tuple[torch.Tensor, str | None]], number: int, samples: Samples, row: int
    ) -> Entry:
        specs, parts = [], []
        for tensor, mask in leaves:
            value = tensor[number]
            if mask is not None:
                real = samples.masks[mask][row]
                count = int(real.sum())
                value = value[:count] if bool(real[:count].all()) else value[real]
            specs.append([str(value.dtype).removeprefix("torch."), list(value.shape), mask])
            parts.append(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return Entry(json.dumps({"tree": tree, "tensors": specs}), b"".join(parts))

    def _mask_of(self, tensor: torch.Tensor, path: str, samples: Samples, rows: int) -> tuple[str | None, bool]:
        """The mask that says which positions are real; and whether the shape is that of this batch only."""
        shape = tuple(tensor.shape)
        if not shape or shape[0] != rows:
            expected = f"None: {path} gives a tensor {list(shape)} for {rows} samples, which cannot be told apart"
            raise CacheError(KEY, path, expected)
        widths = {name: mask.shape[1] for name, mask in samples.masks.items()}
        if not widths:
            return None, False
        if len(shape) < 3:
            return None, len(shape) == 2 and shape[1] in widths.values()
        fitting = [name for name, width in widths.items() if shape[1] == width]
        seen = self._seen.get(path, "")
        if len(fitting) > 1 and path.startswith(("logits", "soft_targets")):
            fitting = [DECODER]
        if len(fitting) > 1 and seen in fitting:
            fitting = [str(seen)]
        # Heads may be as many as positions: [batch, heads, positions, positions] is not cut by its heads.
        square = len(shape) > 3 and any(size in widths.values() for size in shape[2:])
        found = fitting[0] if len(fitting) == 1 and not square else None
        if len(fitting) > 1 or (square and fitting) or seen is None:
            return None, True
        if seen not in ("", found):
            expected = f"None: whether {path} has a dimension for positions cannot be told, by its shape {list(shape)}"
            raise CacheError(KEY, path, expected)
        self._seen[path] = found
        return found, found is None


# ---- from entries to a batch ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    dtype: torch.dtype
    shape: tuple[int, ...]
    mask: str | None
    offset: int
    nbytes: int


@functools.lru_cache(4096)
def _parsed(spec: str) -> tuple[str, tuple[_Leaf, ...]]:
    """The structure and the tensors. Raises ValueError for what this module did not write."""
    content = json.loads(spec)
    leaves, offset = [], 0
    for name, shape, mask in content["tensors"]:
        dtype = getattr(torch, str(name), None)
        if not isinstance(dtype, torch.dtype) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"no tensor {name!r} {shape!r}")
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        leaves.append(_Leaf(dtype, tuple(shape), mask, offset, nbytes))
        offset += nbytes
    return json.dumps(content["tree"]), tuple(leaves)


def joined(entries: Sequence[Entry], samples: Samples) -> TeacherOutput:
    """The answer to a batch: what was cut out lies at the real positions, and zeros elsewhere.

    Args:
        entries: of every row, in order.
        samples: the batch.

    Returns:
        tensors in memory of their own, on the CPU.

    Raises:
        CacheError: an entry is damaged, or those of one batch do not fit together.
    """
    try:
        parsed = [_parsed(entry.spec) for entry in entries]
        buffers = [np.frombuffer(entry.data, dtype=np.uint8) for entry in entries]
        for (_, leaves), buffer in zip(parsed, buffers, strict=True):
            if sum(leaf.nbytes for leaf in leaves) != len(buffer):
                raise ValueError("bytes are missing")
        tree, first = parsed[0]
        if any(other != tree or len(leaves) != len(first) for other, leaves in parsed):
            raise ValueError("answers of one batch have different parts")
        tensors = [
            _together([leaves[number] for _, leaves in parsed], buffers, samples) for number in range(len(first))
        ]
        built = {name: _built(part, tensors) for name, part in json.loads(tree).items()}
        return TeacherOutput(**built)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CacheError(KEY, "entry", f"entries as they were written ({error})") from error


def _together(leaves: Sequence[_Leaf], buffers: Sequence[Bytes], samples: Samples) -> torch.Tensor:
    first = leaves[0]
    if any((leaf.dtype, leaf.mask) != (first.dtype, first.mask) for leaf in leaves):
        raise ValueError("answers of one batch have different dtypes")
    mask = None if first.mask is None else samples.masks[first.mask]
    inner = first.shape if mask is None else first.shape[1:]
    if any((leaf.shape if mask is None else leaf.shape[1:]) != inner for leaf in leaves):
        raise ValueError(f"answers of one batch have different shapes, {sorted({leaf.shape for leaf in leaves})[:4]}")
    if mask is None:
        whole = torch.empty((len(leaves), *inner), dtype=first.dtype)
    else:
        make = torch.empty if bool(mask.all()) else torch.zeros
        whole = make((len(leaves), mask.shape[1], *inner), dtype=first.dtype)
    if whole.numel() == 0:
        return whole
    flat = whole.view(-1).view(torch.uint8).numpy().reshape(len(leaves), -1)
    for row, (leaf, buffer) in enumerate(zip(leaves, buffers, strict=True)):
        source = buffer[leaf.offset : leaf.offset + leaf.nbytes]
        if mask is None:
            flat[row] = source
            continue
        real = mask[row].numpy()
        if leaf.shape[0] != int(real.sum()):
            raise ValueError(f"an answer has {leaf.shape[0]} positions for {int(real.sum())} tokens")
        if real[: leaf.shape[0]].all():
            flat[row, : leaf.nbytes] = source
        else:
            flat[row].reshape(len(real), -1)[real] = source.reshape(leaf.shape[0], -1)
    return whole


def _built(part: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
    if "t" in part:
        return tensors[part["t"]]
    if "d" in part:
        return {name: _built(item, tensors) for name, item in part["d"].items()}
    if "l" in part or "u" in part:
        items: Iterator[Any] = (_built(item, tensors) for item in part.get("l", part.get("u")))
        return list(items) if "l" in part else tuple(items)
    return part["v"]
