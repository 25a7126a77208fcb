"""Distillers by name."""

from __future__ import annotations

import difflib
from typing import Any

from silverspoon_ray.distillers.base import BaseDistiller
from silverspoon_ray.distillers.blockwise import BlockwiseDistiller
from silverspoon_ray.distillers.holistic import HolisticDistiller
from silverspoon_ray.distillers.response_based import ResponseBasedDistiller
from silverspoon_ray.errors import ConfigError

DISTILLERS: dict[str, type[BaseDistiller]] = {
    "response_based": ResponseBasedDistiller,
    "reskd": ResponseBasedDistiller,
    "holistic": HolisticDistiller,
    "hkd": HolisticDistiller,
    "blockwise": BlockwiseDistiller,
    "bkd": BlockwiseDistiller,
}


def distiller_class(distiller: str | type[BaseDistiller]) -> type[BaseDistiller]:
    """The class of that name, or the class itself.

    Raises:
        ConfigError: an unknown name, or a class that is no distiller.
    """
    if isinstance(distiller, type) and issubclass(distiller, BaseDistiller):
        return distiller
    if not isinstance(distiller, str) or distiller not in DISTILLERS:
        near = difflib.get_close_matches(str(distiller), DISTILLERS, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError("distiller", distiller, f"{hint}one of {', '.join(DISTILLERS)}, or a BaseDistiller subclass")
    return DISTILLERS[distiller]


def Distiller(distiller_type: str, **kwargs: Any) -> BaseDistiller:  # noqa: N802  (the reference's name)
    """Build the distiller of that name: ``"response_based"``, ``"holistic"``, ``"blockwise"``, or the
    short ``"reskd"``, ``"hkd"``, ``"bkd"``.

    Args:
        distiller_type: the name.
        kwargs: the keywords of that distiller's class.
    """
    return distiller_class(distiller_type)(**kwargs)
