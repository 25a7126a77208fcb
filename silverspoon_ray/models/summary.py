"""Many module or parameter names as few lines: numbered layers become ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable

# The last number that stands between two dots: "encoder.layer.3.attention" but not "layer3." nor a number at the end.
_NUMBERED = re.compile(r"(.*)\.(\d+)\.(.*)")


def partial_summarize_layer_names(keys: Iterable[str]) -> list[str]:
    """Names that differ only in their last number between dots as one name.

    ``["h.0.b.0.w", "h.0.b.1.w", "h.1.b.0.w", "norm.w"]`` gives ``["h.0.b.[0-1].w", "h.1.b.[0].w", "norm.w"]``: numbers
    in brackets are ranges with both ends, separated by commas; an only number is bracketed too, and one at the end of
    a name is left alone.

    Returns:
        The names with brackets, sorted, then the others, sorted.
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    others = []
    for key in keys:
        match = _NUMBERED.fullmatch(key)
        if match is None:
            others.append(key)
        else:
            before, number, after = match.groups()
            numbers.setdefault((before, after), []).append(int(number))
    grouped = [f"{before}.[{_ranges(found)}].{after}" for (before, after), found in numbers.items()]
    return sorted(grouped) + sorted(others)


def summarize_layer_names(keys: Iterable[str]) -> list[str]:
    """Names that differ only in numbers between dots as one name, in every place where that makes the list shorter.

    ``["h.0.b.0.w", "h.0.b.1.w", "h.1.b.0.w", "h.1.b.1.w", "norm.w"]`` gives ``["h.[0-1].b.[0-1].w", "norm.w"]``. Only
    equal ranges are merged: a name in the result never stands for one that was not in ``keys``.

    Returns:
        The names, sorted; the notation is that of `partial_summarize_layer_names`.
    """
    names = partial_summarize_layer_names(keys)
    while len(shorter := partial_summarize_layer_names(names)) < len(names):
        names = shorter
    return sorted(names)


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2,5"``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
