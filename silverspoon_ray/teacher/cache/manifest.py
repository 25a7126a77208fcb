"""What a cache holds: written by whoever comes first, compared by everyone after."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from silverspoon_ray.errors import CacheError
from silverspoon_ray.teacher.cache.identity import TeacherIdentity
from silverspoon_ray.teacher.cache.place import KEY, Place
from silverspoon_ray.teacher.protocol import TeacherRequest

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
SHARD = ".arrow"


@dataclass(frozen=True)
class Manifest:
    """What every entry of a cache is an answer to.

    Attributes:
        request: see :func:`described`.
        teacher: who answered.
        tokenizer: hash of the vocabulary; None where it was not known.
        padding: ``"left out"``, or ``"kept"`` where padding counts in the loss (``distill_mask="none"``).
        autocast: in which precision the teacher's products are computed; None: in that of its weights. A teacher in
            the student's process shares the student's autocast, one with devices of its own has none.
    """

    request: Mapping[str, Any]
    teacher: TeacherIdentity
    tokenizer: str | None = None
    padding: str = "left out"
    autocast: str | None = None

    def content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "request": dict(self.request),
            "teacher": dataclasses.asdict(self.teacher),
            "tokenizer": self.tokenizer,
            "padding": self.padding,
            "autocast": self.autocast,
        }


def described(request: TeacherRequest) -> dict[str, Any]:
    """The parts of a request that decide an answer, in JSON's types; what a form does not use is None."""
    drawn, listed = request.logits == "sampled", request.logits in ("top_k", "sampled")
    return {
        "logits": request.logits,
        "outputs": sorted(request.outputs),
        "inputs": sorted(request.inputs),
        "selectors": sorted([name, _qualified(select)] for name, select in request.selectors),
        "wire_dtype": None if request.wire_dtype is None else str(request.wire_dtype).removeprefix("torch."),
        "top_k": request.top_k if listed else None,
        "temperature": request.temperature if listed else None,
        "classes": request.classes if listed else None,
        "seed": request.seed if drawn else None,
    }


def _qualified(select: Any) -> str:
    if dataclasses.is_dataclass(select):
        return f"{type(select).__module__}.{select!r}"
    kind = select if hasattr(select, "__qualname__") else type(select)
    return f"{kind.__module__}.{kind.__qualname__}"


def tokenizer_hash(processing_class: Any) -> str | None:
    """Of a tokenizer's vocabulary; None for anything that has none."""
    vocabulary: Any = getattr(processing_class, "get_vocab", None)
    if vocabulary is None:
        return None
    content = json.dumps(sorted(vocabulary().items()))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def agree(place: Place, manifest: Manifest) -> None:
    """Write the manifest if the place has none yet; otherwise see that it is the same.

    Raises:
        CacheError: it says something else (the first field that differs, with both values), cannot be read, or is
            missing where there are entries.
    """
    if stored(place) is None:
        with place.writing(MANIFEST, exclusive=True) as stream:
            stream.write(json.dumps(manifest.content(), indent=1).encode())
    there = stored(place)
    if there is None:
        raise CacheError(KEY, place.uri, f"a place that keeps files: {MANIFEST} has been written, and is not there")
    compare(place, there, manifest.content())


def stored(place: Place) -> dict[str, Any] | None:
    """The manifest's content; None in an empty place.

    Raises:
        CacheError: it cannot be read, or is missing where there are entries.
    """
    raw = place.read(MANIFEST)
    if raw is None:
        if any(name.endswith(SHARD) and not name.startswith(".") for name in place.names()):
            # Whoever writes the manifest does so before any entry; but it may have come between the two looks.
            raw = place.read(MANIFEST)
            if raw is None:
                expected = f"a cache with its {MANIFEST}; without, nobody knows whose answers these are"
                raise CacheError(KEY, place.uri, expected)
        else:
            return None
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise CacheError(KEY, place.uri, f"a cache whose {MANIFEST} can be read ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CacheError(KEY, place.uri, f"a cache of format {FORMAT}; that of its {MANIFEST} is {found!r}")
    return content


def compare(place: Place, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise a CacheError that names the first field that differs, and both values."""
    found, needed = dict(_flat(there)), dict(_flat(json.loads(json.dumps(wanted))))
    for field, value in needed.items():
        has = found.get(field, "nothing")
        if field == "tokenizer" and None in (has, value):
            continue  # not known to one of the two
        if has != value:
            expected = f"a cache with {field} {value!r}, which this run needs; this one has {has!r}"
            raise CacheError(KEY, place.uri, f"{expected}. Give each its own directory")


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
