"""What travels instead of logits, from every layout of a teacher on a real Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from silverspoon_ray import TeacherGroup, TeacherPlacement
from silverspoon_ray.errors import ConfigError, TeacherError
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherRequest
from tests.cluster.test_pipeline import student_history
from tests.support import VOCABULARY, Pad, bert_classifier, llama, ragged_data

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

TEACHER = partial(llama, 2, 32, 3)
LAYOUTS = {
    "one": {},
    "pp": {"num_devices": 2},
    "tp": {"strategy": "tp", "num_devices": 2},
    "sharded": {"strategy": "sharded", "num_devices": 2},
}
FORMS: dict[str, dict[str, Any]] = {
    "hidden": {},
    "top_k": {"top_k": 8, "temperature": 2.0},
    "sampled": {"top_k": 12, "seed": 3},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    TEACHER().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=LAYOUTS)
def group(request: pytest.FixtureRequest, ray_cluster: Any, directory: Path) -> Any:
    with TeacherGroup.create(str(directory), TeacherPlacement(**LAYOUTS[request.param])) as created:
        yield created


def batch() -> dict[str, Any]:
    made = Pad()(ragged_data(5))
    del made["labels"]
    return made


def exact(group: TeacherGroup) -> bool:
    return group.placement.strategy != "tp"


@pytest.mark.parametrize("form", FORMS)
def test_answers(group: TeacherGroup, form: str) -> None:
    """As in one piece; drawn classes too, whichever rank has the sample."""
    answer = group.handle.forward(batch(), logits=form, **FORMS[form])
    local = LocalTeacher(TEACHER().eval()).answer(batch(), TeacherRequest(logits=form, **FORMS[form]))
    assert answer.logits is None
    assert answer.soft_targets.keys() == local.soft_targets.keys()
    for name, tensor in local.soft_targets.items():
        found = answer.soft_targets[name]
        assert found.dtype == tensor.dtype
        if exact(group):
            assert torch.equal(found, tensor), name
        elif tensor.is_floating_point():
            torch.testing.assert_close(found, tensor, rtol=1e-4, atol=1e-5)


def test_the_head(group: TeacherGroup) -> None:
    """With what travels it gives the logits that did not."""
    head = group.handle.output_head()
    hidden = group.handle.forward(batch(), logits="hidden").soft_targets["hidden"]
    full = group.handle.forward(batch()).logits
    torch.testing.assert_close(head.logits(hidden), full, rtol=1e-4, atol=1e-5)
    assert head.weight.shape == (VOCABULARY, 32)


@pytest.mark.parametrize("form", ["hidden", "sampled"])
def test_loss_curves(group: TeacherGroup, form: str) -> None:
    got = student_history(group.handle, teacher_logits=form, teacher_top_k=12)
    expected = student_history(TEACHER(), teacher_logits=form, teacher_top_k=12)
    assert len(got) == len(expected)
    tolerance = {"rel": 0, "abs": 0} if exact(group) else {"rel": 1e-3, "abs": 1e-5}
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, **tolerance)


def test_bytes(group: TeacherGroup) -> None:
    """A hidden state in place of logits, 16 classes in place of all."""
    positions = batch()["input_ids"].numel()
    sizes = {}
    for form in (*FORMS, "full"):
        stream = group.handle.open(TeacherRequest(logits=form, top_k=8))
        answers = [stream.submit(batch()) for _ in range(2)]  # the first of a request runs whole
        for answer in answers:
            answer.result()
        sizes[form] = answers[-1].nbytes / positions
    assert sizes == {"full": VOCABULARY * 4, "hidden": 32 * 4, "top_k": 8 * 2 + 9 * 4, "sampled": 8 * 2 + 8 * 4}


def breaks_when_run_again() -> Any:
    """A teacher whose head may run once, to be verified."""
    model = TEACHER()
    runs: list[int] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) > 1:
            raise RuntimeError("the head ran a second time")
        return torch.nn.functional.linear(hidden, model.lm_head.weight)

    model.lm_head.forward = forward
    return model


def test_the_head_is_not_run() -> None:
    with TeacherGroup.create(breaks_when_run_again) as group:
        hidden = [group.handle.forward(batch(), logits="hidden").soft_targets["hidden"] for _ in range(3)]
        assert torch.equal(hidden[0], hidden[2])
        with pytest.raises(TeacherError, match="second time"):
            group.handle.forward(batch())


def test_a_teacher_without_a_head() -> None:
    with TeacherGroup.create(partial(bert_classifier, 1)) as group:
        with pytest.raises(TeacherError, match="no linear output head"):
            group.handle.forward(batch(), logits="hidden")
        with pytest.raises(ConfigError, match="one of full"):
            group.handle.forward(batch(), logits="hiden")
