"""The teacher as an actor group, on a real Ray."""

from __future__ import annotations

import os
import pickle
import signal
import time
from functools import partial
from typing import Any

import pytest
import ray
import torch

import silverspoon_ray
from silverspoon_ray import ResponseBasedDistiller, TeacherGroup, TeacherPlacement
from silverspoon_ray.errors import ConfigError, PlacementError, TeacherError
from tests.support import Pad, bert_classifier, gpt2, llama, ragged_data, trained, training_arguments, without_times

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

IDS = torch.arange(1, 13).view(2, 6)


def reserved() -> set[str]:
    """Placement groups that hold or want resources."""
    table = ray.util.placement_group_table()
    return {key for key, group in table.items() if group["state"] != "REMOVED"}


def nothing_left(before: set[str]) -> None:
    """Nothing is reserved beyond what was, and what those groups do not hold is free again."""
    wait_until(lambda: reserved() <= before)
    held = sum(
        bundle.get("CPU", 0)
        for key, group in ray.util.placement_group_table().items()
        if key in reserved()
        for bundle in group["bundles"].values()
    )
    total = ray.cluster_resources()["CPU"]
    wait_until(lambda: ray.available_resources().get("CPU", 0.0) == total - held)


def wait_until(condition: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


class Raises(torch.nn.Module):
    """A teacher that refuses one kind of batch."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if bool((input_ids == 13).any()):
            raise RuntimeError("unlucky token in the teacher")
        return torch.nn.functional.one_hot(input_ids, 64).float()


@pytest.fixture(scope="module")
def group(ray_cluster: Any) -> Any:
    with TeacherGroup.create(partial(llama, 2, 32, 2), TeacherPlacement(replicas=2)) as created:
        yield created


@pytest.mark.parametrize("kind", ["path", "callable", "module"])
def test_a_teacher_comes_as_path_callable_or_module(kind: str, tmp_path: Any) -> None:
    model = llama(2, 32, 2).eval()
    model.save_pretrained(tmp_path)
    teacher = {"path": str(tmp_path), "callable": partial(llama, 2, 32, 2), "module": model}[kind]
    with TeacherGroup.create(teacher) as group:
        answer = group.handle.forward({"input_ids": IDS})
        with torch.no_grad():
            expected = model(IDS, use_cache=False).logits
        assert torch.equal(answer.logits, expected)
        assert group.handle.structure.config.hidden_size == 32
        assert all(p.device.type == "meta" for p in group.handle.structure.parameters())


def test_captures_by_name(group: TeacherGroup) -> None:
    model = llama(2, 32, 2).eval()
    answer = group.handle.forward(
        {"input_ids": IDS}, logits=None, outputs=["model.layers.0"], inputs=["model.layers.1"]
    )
    with torch.no_grad():
        hidden = model(IDS, output_hidden_states=True).hidden_states
    assert answer.logits is None
    assert torch.equal(answer.outputs["model.layers.0"], hidden[1])
    assert torch.equal(answer.inputs["model.layers.1"], hidden[1])


def test_two_calls_are_bit_equal_with_dropout_in_the_model() -> None:
    with TeacherGroup.create(partial(gpt2, 2, 32, 2, 0.5)) as group:
        first, second = (group.handle.forward({"input_ids": IDS}).logits for _ in range(2))
        assert torch.equal(first, second)


def test_a_reader_cannot_change_what_others_read(group: TeacherGroup) -> None:
    first = group.handle.forward({"input_ids": IDS})
    expected = first.logits.clone()
    first.logits.zero_()
    assert torch.equal(group.handle.forward({"input_ids": IDS}).logits, expected)


def test_the_handle_works_in_another_process(group: TeacherGroup) -> None:
    @ray.remote(num_cpus=0)
    def ask(handle: Any) -> torch.Tensor:
        return handle.forward({"input_ids": IDS}).logits

    here = group.handle.forward({"input_ids": IDS}).logits
    assert torch.equal(ray.get(ask.remote(group.handle), timeout=60), here)
    assert len(pickle.dumps(TeacherPlacement())) < 1000


class Waits(torch.nn.Module):
    """A teacher that answers once a file is there, so that a test knows what is outstanding."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        wait_until(lambda: os.path.exists(self.gate))
        return torch.nn.functional.one_hot(input_ids, 64).float()


def test_replicas_share_the_work_in_processes_of_their_own(tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    with TeacherGroup.create(partial(Waits, str(gate)), TeacherPlacement(replicas=2)) as group:
        stream = group.handle.open(silverspoon_ray.teacher.protocol.TeacherRequest())
        answers = [stream.submit({"input_ids": IDS}) for _ in range(8)]
        gate.touch()
        for answer in answers:
            answer.result()
        stats = group.stats()
    assert [replica["forwards"] for replica in stats] == [4, 4]
    assert len({replica["pid"] for replica in stats} | {os.getpid()}) == 3
    assert all(replica["bytes_sent"] > 0 and replica["busy_s"] > 0 for replica in stats)


def test_actors_can_be_told_apart(group: TeacherGroup) -> None:
    from ray.util.state import list_actors

    address = ray.get_runtime_context().gcs_address  # others on the machine may have a Ray too
    alive = [actor.class_name for actor in list_actors(address, filters=[("state", "=", "ALIVE")])]
    assert sum(name.startswith("Teacher") for name in alive) >= 2


def student_history(teacher: Any, **arguments: Any) -> list[dict[str, Any]]:
    distiller = ResponseBasedDistiller(
        student_model=gpt2(1),
        teacher_model=teacher,
        train_dataset=ragged_data(24),
        eval_dataset=ragged_data(7, seed=5),
        data_collator=Pad(),
        args=training_arguments(
            silverspoon_ray, max_steps=8, eval_strategy="steps", eval_steps=4, alpha=0.3, **arguments
        ),
    )
    return without_times(trained(distiller))


@pytest.fixture(scope="module")
def local_history() -> list[dict[str, Any]]:
    return student_history(llama(2, 32, 2))


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("replicas", [1, 2])
def test_remote_equals_local(
    group: TeacherGroup, local_history: list[dict[str, Any]], prefetch: int, replicas: int
) -> None:
    handle = silverspoon_ray.TeacherHandle(group.handle.replicas[:replicas], 60)
    assert student_history(handle, teacher_prefetch=prefetch) == local_history


def test_no_overlap_on_request(group: TeacherGroup, local_history: list[dict[str, Any]]) -> None:
    assert student_history(group.handle, overlap_teacher_forward=False) == local_history


def test_wire_dtype_halves_the_bytes(group: TeacherGroup) -> None:
    histories = {}
    for wire in (None, "bfloat16"):
        distiller = ResponseBasedDistiller(
            student_model=llama(1),
            teacher_model=group.handle,
            train_dataset=ragged_data(8),
            data_collator=Pad(),
            args=training_arguments(silverspoon_ray, max_steps=2, teacher_wire_dtype=wire),
        )
        histories[wire] = trained(distiller)
    full, half = (histories[wire][0]["teacher/bytes_per_step"] for wire in (None, "bfloat16"))
    assert full == 2 * half > 0
    assert histories["bfloat16"][0]["loss"] == pytest.approx(histories[None][0]["loss"], rel=0.05)


def test_identity_with_a_remote_teacher() -> None:
    with TeacherGroup.create(partial(bert_classifier, 3)) as group:
        student = bert_classifier(3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        data = [{"input_ids": torch.arange(1, 9), "labels": torch.tensor(i % 3)} for i in range(4)]
        distiller = ResponseBasedDistiller(
            student_model=student,
            teacher_model=group.handle,
            train_dataset=data,
            args=training_arguments(silverspoon_ray, max_steps=1),
        )
        row = trained(distiller)[0]
        assert row["loss"] == pytest.approx(0, abs=1e-7)
        assert row["grad_norm"] == pytest.approx(0, abs=1e-6)


def test_a_teacher_that_raises_says_what_where_and_on_which_batch() -> None:
    with TeacherGroup.create(Raises) as group:
        with pytest.raises(TeacherError) as caught:
            group.handle.forward({"input_ids": torch.full((1, 4), 13)})
        error = caught.value
        assert error.rank == 0
        assert "input_ids int64[1, 4]" in (error.batch or "")
        assert "unlucky token in the teacher" in error.remote_traceback
        assert "in forward" in error.remote_traceback
        assert group.handle.forward({"input_ids": IDS}).logits.shape == (2, 6, 64)  # and goes on


def test_the_student_sees_the_teachers_error_at_once() -> None:
    data = [{"input_ids": torch.full((4,), 13 if i == 5 else 1), "labels": torch.ones(4).long()} for i in range(8)]
    with TeacherGroup.create(Raises) as group:
        distiller = ResponseBasedDistiller(
            student_model=llama(1),
            teacher_model=group.handle,
            train_dataset=data,
            args=training_arguments(silverspoon_ray, max_steps=8, per_device_train_batch_size=1),
        )
        with pytest.raises(TeacherError, match="unlucky token"):
            trained(distiller)


def test_a_killed_teacher_comes_back_and_losses_are_the_same(local_history: list[dict[str, Any]]) -> None:
    import transformers

    class Kill(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                os.kill(pid, signal.SIGKILL)

    with TeacherGroup.create(partial(llama, 2, 32, 2)) as group:
        pid = group.stats()[0]["pid"]
        distiller = ResponseBasedDistiller(
            student_model=gpt2(1),
            teacher_model=group.handle,
            train_dataset=ragged_data(24),
            eval_dataset=ragged_data(7, seed=5),
            data_collator=Pad(),
            args=training_arguments(silverspoon_ray, max_steps=8, eval_strategy="steps", eval_steps=4, alpha=0.3),
            callbacks=[Kill()],
        )
        assert without_times(trained(distiller)) == local_history
        assert group.stats()[0]["pid"] != pid


def test_devices_that_do_not_exist_are_an_error_with_numbers_and_leave_nothing() -> None:
    before = reserved()
    begin = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        TeacherGroup.create(
            partial(llama, 2), TeacherPlacement(replicas=1, resources_per_device={"unicorn": 3}, startup_timeout_s=3)
        )
    assert time.monotonic() - begin < 30
    assert caught.value.needed == {"CPU": 1.0, "unicorn": 3}
    assert caught.value.available["unicorn"] == 0
    assert "3 unicorn" in str(caught.value)
    nothing_left(before)


def test_more_replicas_than_fit_give_back_those_that_did() -> None:
    before = reserved()
    with pytest.raises(PlacementError, match="replica"):
        TeacherGroup.create(partial(llama, 2), TeacherPlacement(replicas=50, startup_timeout_s=4))
    nothing_left(before)


def test_a_model_that_cannot_be_loaded_leaves_nothing() -> None:
    before = reserved()

    def broken() -> torch.nn.Module:
        raise OSError("no weights here")

    with pytest.raises(TeacherError, match="no weights here"):
        TeacherGroup.create(broken, TeacherPlacement(replicas=2))
    nothing_left(before)


def test_a_slow_start_ends_within_its_limit() -> None:
    before = reserved()

    def slow() -> torch.nn.Module:
        time.sleep(600)
        raise AssertionError

    with pytest.raises(TeacherError, match="did not come within"):
        TeacherGroup.create(slow, TeacherPlacement(startup_timeout_s=5))
    nothing_left(before)


def test_shutdown_gives_everything_back_and_may_be_called_twice() -> None:
    before = reserved()
    group = TeacherGroup.create(partial(llama, 2))
    pid = group.stats()[0]["pid"]
    group.shutdown()
    group.shutdown()
    nothing_left(before)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    with pytest.raises(TeacherError, match="died"):
        group.handle.forward({"input_ids": IDS})


@pytest.mark.parametrize("source", ["./no/such/model", 7, torch.nn.Linear])
def test_what_is_no_model_is_refused_before_anything_is_reserved(source: Any) -> None:
    before = reserved()
    with pytest.raises(ConfigError, match="teacher="):
        TeacherGroup.create(source)
    assert reserved() == before


def test_unknown_captures_name_the_near_ones(group: TeacherGroup) -> None:
    with pytest.raises(TeacherError, match=r"model\.layers\.0"):
        group.handle.forward({"input_ids": IDS}, outputs=["model.layer.0"])
