"""Names of many layers as few lines: the same lines as silverspoon-kd."""

from __future__ import annotations

import random
import re

import pytest

from silverspoon_ray.models.summary import partial_summarize_layer_names, summarize_layer_names
from tests.support import bert_mlm, gpt2, llama, t5, vit


@pytest.mark.parametrize(
    ("keys", "whole", "partial"),
    [
        ([], [], []),
        (["b", "a"], ["a", "b"], ["a", "b"]),
        (["h.0.w", "h.1.w", "h.2.w"], ["h.[0-2].w"], ["h.[0-2].w"]),
        (["h.10.w", "h.2.w", "h.9.w"], ["h.[2,9-10].w"], ["h.[2,9-10].w"]),
        (["h.5.w"], ["h.[5].w"], ["h.[5].w"]),
        (["h.0", "h.1"], ["h.0", "h.1"], ["h.0", "h.1"]),
        (["h0.w", "h1.w"], ["h0.w", "h1.w"], ["h0.w", "h1.w"]),
        (["h.0.w", "a", "h.1.w"], ["a", "h.[0-1].w"], ["h.[0-1].w", "a"]),
        (["h.0.b", "h.0.w", "h.1.w"], ["h.[0-1].w", "h.[0].b"], ["h.[0-1].w", "h.[0].b"]),
        (
            ["e.0.l.0.w", "e.0.l.1.w", "e.1.l.0.w", "e.1.l.1.w", "e.2.l.0.w"],
            ["e.[0-1].l.[0-1].w", "e.[2].l.[0].w"],
            ["e.0.l.[0-1].w", "e.1.l.[0-1].w", "e.2.l.[0].w"],
        ),
    ],
)
def test_by_hand(keys: list[str], whole: list[str], partial: list[str]) -> None:
    given = list(keys)
    assert summarize_layer_names(keys) == whole
    assert partial_summarize_layer_names(keys) == partial
    assert keys == given


def names(seed: int) -> list[str]:
    """Names that hit the rules often: few words, small numbers, numbers at every place."""
    chance = random.Random(seed)
    words = ["a", "b", "h", "0", "1", "2", "3", "10", "[0]", "x1", ""]
    return [".".join(chance.choices(words, k=chance.randint(1, 6))) for _ in range(chance.randint(0, 12))]


def test_same_as_silverspoon_kd() -> None:
    kd = pytest.importorskip("silverspoon_kd")
    models = [llama(layers=11), gpt2(layers=3), bert_mlm(layers=2), t5(layers=3), vit(layers=12)]
    lists = [names(seed) for seed in range(2000)]
    lists += [[name for name, _ in model.named_parameters()] for model in models]
    lists += [[name for name, _ in model.named_modules()] for model in models]
    for keys in lists:
        assert summarize_layer_names(keys) == kd.summarize_layer_names(list(keys)), keys
        assert partial_summarize_layer_names(keys) == kd.partial_summarize_layer_names(list(keys)), keys


def expanded(name: str) -> list[str]:
    """The names that a summary stands for."""
    match = re.search(r"\.\[([\d,-]+)\]\.", name)
    if match is None:
        return [name]
    found = []
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            found += expanded(f"{name[: match.start()]}.{number}.{name[match.end() :]}")
    return found


def test_a_summary_stands_for_exactly_the_names_given() -> None:
    for model in (llama(layers=11), t5(layers=3), vit(layers=12)):
        keys = [name for name, _ in model.named_parameters()]
        for summary in (summarize_layer_names(keys), partial_summarize_layer_names(keys)):
            assert len(summary) < len(keys)
            assert sorted(name for line in summary for name in expanded(line)) == sorted(keys)
