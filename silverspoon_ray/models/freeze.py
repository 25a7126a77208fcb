"""Which parameters are trained."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from torch import nn

from silverspoon_ray.errors import ConfigError


def freeze_parameters(model: nn.Module, freeze_regex_patterns: Sequence[str], thaw_not_matched: bool = False) -> None:
    """Set ``requires_grad`` by name.

    Args:
        model: changed in place.
        freeze_regex_patterns: regular expressions that match a whole dotted name (``re.fullmatch``): of a parameter
            (``r".*\\.bias"``) or of a module, all of whose parameters are then frozen (``"model.embed_tokens"``,
            ``r"model\\.layers\\.[0-3]"``). A parameter that is used under several names, as tied embeddings are, is
            frozen by any of them.
        thaw_not_matched: let every other parameter be trained; False: leave the others as they are.

    Raises:
        ConfigError: a pattern matches nothing, or is no regular expression; nothing has been changed then.
    """
    patterns = [freeze_regex_patterns] if isinstance(freeze_regex_patterns, str) else list(freeze_regex_patterns)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    frozen: set[int] = set()
    for pattern in patterns:
        expression = _compiled(pattern)
        inside = tuple(f"{name}." for name in modules if expression.fullmatch(name))
        matched = [name for name in parameters if expression.fullmatch(name) or name.startswith(inside)]
        if not matched:
            raise ConfigError(
                "freeze_regex_patterns", pattern, _nothing_matched(pattern, expression, parameters, modules)
            )
        frozen.update(id(parameters[name]) for name in matched)
    for parameter in parameters.values():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
        elif thaw_not_matched and (parameter.is_floating_point() or parameter.is_complex()):
            parameter.requires_grad_(True)


def _compiled(pattern: object) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise ConfigError("freeze_regex_patterns", pattern, "a list of regular expressions")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError("freeze_regex_patterns", pattern, f"a regular expression ({error})") from error


def _nothing_matched(
    pattern: str, expression: re.Pattern[str], parameters: Sequence[str] | dict[str, nn.Parameter], modules: list[str]
) -> str:
    """What is wrong with a pattern without a match: most often it matches a part of names, as in silverspoon-kd."""
    partly = [name for name in parameters if expression.search(name)]
    if partly:
        shown = ", ".join(partly[:3]) + (", ..." if len(partly) > 3 else "")
        return f"a pattern for a whole name; it matches only a part of {shown}: write {f'.*{pattern}.*'!r} for those"
    near = difflib.get_close_matches(pattern.replace("\\", ""), [*parameters, *modules], n=5, cutoff=0.3)
    return f"no parameter or module has such a name; near are {', '.join(near) or 'none'}"
