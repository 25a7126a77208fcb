"""Waiting for a teacher, with a limit and with errors that say what was waited for."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from silverspoon_ray.errors import SilverspoonError, TeacherError


class AnswerLateError(TeacherError):
    """The answer did not come in time."""


class AnswerLostError(TeacherError):
    """The answer existed, but the process or node that held it is gone."""


def get(ref: Any, timeout_s: float, what: str, rank: int | None = None, batch: str | None = None) -> Any:
    """``ray.get`` with a limit, and with errors that say what was waited for.

    Raises:
        TeacherError: the teacher raised (its own error, with its traceback), died for good, or took too long.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SilverspoonError):
            raise cause from None
        raise TeacherError(f"{what} failed: {cause!r}", rank=rank, batch=batch, remote_traceback=str(error)) from None
    except GetTimeoutError:
        raise AnswerLateError(f"{what} did not come within {timeout_s:g} s", rank=rank, batch=batch) from None
    except RayActorError as error:
        reason = f"{what} will not come: the teacher's process died and was not brought back ({error})"
        raise TeacherError(reason, rank=rank, batch=batch) from None
    except RayError as error:
        raise AnswerLostError(f"{what} was lost: {first_line(error)}", rank=rank, batch=batch) from None


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
