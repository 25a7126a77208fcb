"""Batches draw from a stream of their own: neither it nor the global generators feel the other."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from silverspoon_ray.teacher.random_stream import (
    RandomStream,
    global_state,
    set_global_state,
    state_from_json,
    state_to_json,
)

GENERATORS = {
    "python": random.random,
    "python_gauss": lambda: random.gauss(0, 1),  # keeps half of a pair for the next call
    "numpy": lambda: float(np.random.rand()),
    "numpy_gauss": lambda: float(np.random.randn()),
    "torch": lambda: float(torch.rand(())),
    "torch_gauss": lambda: float(torch.randn(())),
    "torch_int": lambda: int(torch.randint(0, 10**9, ())),
}


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Any:
    state = global_state()
    yield
    set_global_state(state)


def draw(name: str, count: int = 3) -> list[float]:
    return [GENERATORS[name]() for _ in range(count)]


@pytest.mark.parametrize("name", GENERATORS)
def test_the_global_generators_do_not_feel_it(name: str) -> None:
    draw(name, 1)
    state = global_state()
    undisturbed = draw(name)
    set_global_state(state)
    stream = RandomStream(3)
    disturbed = []
    for _ in range(3):
        with stream.active():
            draw(name)
        disturbed += draw(name, 1)
    assert disturbed == undisturbed


@pytest.mark.parametrize("name", GENERATORS)
def test_it_does_not_feel_the_global_generators(name: str) -> None:
    first, second = RandomStream(3), RandomStream(3)
    with first.active():
        whole = draw(name, 6)
    parts = []
    for _ in range(3):
        with second.active():
            parts += draw(name, 2)
        draw(name)
        set_global_state(RandomStream(99).state)
    assert parts == whole
    assert len(set(whole)) == 6


@pytest.mark.parametrize("name", GENERATORS)
def test_seeds(name: str) -> None:
    def drawn(seed: int) -> list[float]:
        with RandomStream(seed).active():
            return draw(name)

    assert drawn(2**63 - 1) == drawn(2**63 - 1)
    assert drawn(0) != drawn(1)


@pytest.mark.parametrize("name", GENERATORS)
def test_states_are_json(name: str) -> None:
    stream = RandomStream(3)
    with stream.active():
        draw(name, 1)
    text = json.dumps(state_to_json(stream.state))
    with stream.active():
        wanted = draw(name)
    other = RandomStream(0)
    other.state = state_from_json(json.loads(text))
    with other.active():
        assert draw(name) == wanted


@pytest.mark.parametrize("name", GENERATORS)
def test_an_exception_leaves_the_stream_where_it_came_to(name: str) -> None:
    state = global_state()
    undisturbed = draw(name)
    set_global_state(state)
    stream, other = RandomStream(3), RandomStream(3)
    begun: list[float] = []

    def broken() -> None:
        with stream.active():
            begun.extend(draw(name, 2))
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert draw(name) == undisturbed
    with stream.active():
        begun += draw(name, 2)
    with other.active():
        assert draw(name, 4) == begun


@pytest.mark.parametrize("key", ["python", "numpy", "torch"])
def test_a_state_that_no_generator_takes(key: str) -> None:
    before = draw("torch", 0)
    saved = state_to_json(RandomStream(3).state)
    broken = {
        "python": [3, [1, 2], None],
        "numpy": ["MT19937", [1, 2], 0, 0, 0.0],
        "torch": saved["torch"][:40],
    }
    state = global_state()
    with pytest.raises((LookupError, TypeError, ValueError, RuntimeError)):
        state_from_json({**saved, key: broken[key]})
    after = draw("torch") + draw("numpy") + draw("python")
    set_global_state(state)
    assert after == draw("torch") + draw("numpy") + draw("python"), "the generators must be left as they were"
    assert before == []


def test_cuda_is_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would seed the student's devices too."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    RandomStream(5)
    assert seeded == []
    torch.manual_seed(5)
    assert seeded == [5]
