"""Every error that silverspoon_ray raises on purpose.

All derive from :class:`SilverspoonError`. Where a Python built-in says the same thing, the class derives from it as
well, so that ``except ValueError`` keeps working for people who come from silverspoon-kd.
"""

from __future__ import annotations

from collections.abc import Mapping


class SilverspoonError(Exception):
    """Base of all errors of this package."""


class ConfigError(SilverspoonError, ValueError):
    """A value that the user gave cannot be used; raised before any device is taken.

    Args:
        key: the keyword or dotted configuration path, e.g. ``"args.alpha"``.
        value: what was given.
        expected: what would be right, as the rest of a sentence.
    """

    def __init__(self, key: str, value: object, expected: str) -> None:
        super().__init__(key, value, expected)
        self.key = key
        self.value = value
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}: {self.expected}"


class NotYetError(ConfigError):
    """The keyword is part of the contract, but its feature is not built yet. Setting it is never silently ignored."""


class VocabularyError(ConfigError):
    """The vocabularies of teacher and student do not belong together."""


class AlignmentError(ConfigError):
    """Modules of teacher and student that were to be compared do not match, or what they give cannot be compared."""


class CacheError(ConfigError):
    """A teacher cache cannot be used: it belongs to another teacher or request, is damaged, or is out of reach."""


class PlacementError(SilverspoonError, RuntimeError):
    """The devices asked for were not to be had within the stated time. Nothing stays reserved.

    Args:
        reason: one sentence.
        needed: resources asked for, e.g. ``{"GPU": 8}``.
        available: resources that were free when the wait ended.
        total: resources of the whole cluster.
        waited_s: seconds waited.
    """

    def __init__(
        self,
        reason: str,
        *,
        needed: Mapping[str, float] | None = None,
        available: Mapping[str, float] | None = None,
        total: Mapping[str, float] | None = None,
        waited_s: float = 0.0,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.needed = dict(needed or {})
        self.available = dict(available or {})
        self.total = dict(total or {})
        self.waited_s = waited_s

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_placement_error, (self.reason, self.needed, self.available, self.total, self.waited_s)

    def __str__(self) -> str:
        return (
            f"{self.reason} (needed {_amounts(self.needed)}; free {_amounts(self.available)}; "
            f"cluster has {_amounts(self.total)}; waited {self.waited_s:.1f} s)"
        )


def _rebuild_placement_error(
    reason: str, needed: dict[str, float], available: dict[str, float], total: dict[str, float], waited_s: float
) -> PlacementError:
    return PlacementError(reason, needed=needed, available=available, total=total, waited_s=waited_s)


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"


class TeacherError(SilverspoonError, RuntimeError):
    """The teacher failed: its forward raised, its process died for good, or its answer did not come in time.

    Args:
        reason: one sentence.
        rank: which replica, None where it is not one replica's fault.
        batch: what it was working on, e.g. ``"batch 12: input_ids int64[8, 128]"``.
        remote_traceback: the teacher's own traceback as text, empty if there is none.
    """

    def __init__(
        self, reason: str, *, rank: int | None = None, batch: str | None = None, remote_traceback: str = ""
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.rank = rank
        self.batch = batch
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_teacher_error, (self.reason, self.rank, self.batch, self.remote_traceback)

    def __str__(self) -> str:
        where = [f"teacher replica {self.rank}"] if self.rank is not None else []
        where += [self.batch] if self.batch else []
        text = self.reason + (f" ({', '.join(where)})" if where else "")
        return (
            f"{text}\n--- the teacher's own traceback ---\n{self.remote_traceback}" if self.remote_traceback else text
        )


def _rebuild_teacher_error(reason: str, rank: int | None, batch: str | None, remote_traceback: str) -> TeacherError:
    return TeacherError(reason, rank=rank, batch=batch, remote_traceback=remote_traceback)
