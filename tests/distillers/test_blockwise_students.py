"""Students of another width, head size and head count: they learn blockwise, are saved plain, and are loaded back alone
or in the teacher's place."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import silverspoon_ray
from silverspoon_ray import (
    BlockwiseDistiller,
    create_alignments,
    load_student_weights_from_checkpoint,
    load_student_with_projectors_from_checkpoint,
)
from silverspoon_ray.errors import ConfigError
from tests.distillers.feature_kinds import first, on_teachers_input, watched
from tests.distillers.widths import WIDTHS
from tests.support import PrinterCallback, trained, training_arguments

STEPS = 30


def distiller(name: str, student: nn.Module, teacher: nn.Module, directory: Path, **arguments: Any) -> Any:
    kind = WIDTHS[name]
    built = BlockwiseDistiller(
        teacher_model=teacher,
        alignments=create_alignments(teacher, student, kind.modules),
        train_dataset=kind.data(64),
        args=training_arguments(
            silverspoon_ray,
            **{
                "output_dir": str(directory),
                "max_steps": STEPS,
                "learning_rate": 5e-3,
                "save_strategy": "steps",
                "save_steps": STEPS,
                **arguments,
            },
        ),
    )
    built.remove_callback(PrinterCallback)
    return built


class Run:
    """A finished run, shared by the tests of one kind."""

    def __init__(self, name: str, directory: Path) -> None:
        self.kind = WIDTHS[name]
        self.student, self.teacher = self.kind.student(), self.kind.teacher()
        self.built = distiller(name, self.student, self.teacher, directory)
        self.losses = [row["loss"] for row in trained(self.built) if "loss" in row]
        self.checkpoint = directory / f"checkpoint-{STEPS}"
        self.batch = self.built.data_collator(self.kind.data(3))
        labels = self.batch.pop("labels")
        if name == "t5":
            self.batch["decoder_input_ids"] = labels


@pytest.fixture(scope="module", params=WIDTHS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(request.param, tmp_path_factory.mktemp(request.param))


def test_it_learns(run: Run) -> None:
    assert sum(run.losses[-3:]) < 0.8 * sum(run.losses[:3])
    assert all(set(a.projectors) == {"input_projector", "output_projector"} for a in run.built.alignments)


def test_the_student_is_saved_plain(run: Run, tmp_path: Path) -> None:
    """By the run, and by a user's own ``save_pretrained`` after it; bit-equal to the student in memory."""
    plain = run.kind.student()
    plain.save_pretrained(tmp_path / "untrained")
    wanted = load_file(tmp_path / "untrained" / "model.safetensors").keys()
    run.student.save_pretrained(tmp_path / "user")
    for directory in (run.checkpoint, tmp_path / "user"):
        assert load_file(directory / "model.safetensors").keys() == wanted
        again = type(run.student).from_pretrained(directory)
        assert again.state_dict().keys() == plain.state_dict().keys()
        for key, value in again.state_dict().items():
            assert torch.equal(value, run.student.state_dict()[key]), key
    described = json.loads((run.checkpoint / "alignments.json").read_text())
    assert described["distiller"] == "blockwise"
    assert [entry["student_module"] for entry in described["alignments"]] == [
        a.student_module_name for a in run.built.alignments
    ]
    saved = load_file(run.checkpoint / "projectors.safetensors")
    for number, alignment in enumerate(run.built.alignments):
        for which, projector in alignment.projectors.items():
            for key, value in projector.state_dict().items():
                assert torch.equal(saved.pop(f"{number}.{which}.{key}"), value)
    assert not saved


def test_weights_are_loaded_into_a_student(run: Run) -> None:
    again = run.kind.student(seed=9)
    assert load_student_weights_from_checkpoint(again, run.checkpoint, "") == {
        "missing_keys": [],
        "unexpected_keys": [],
    }
    for key, value in again.state_dict().items():
        assert torch.equal(value, run.student.state_dict()[key]), key


def by_hand(run: Run) -> torch.Tensor:
    """The teacher's logits when its blocks' outputs are replaced, one after the other, by those of the pieces."""
    student, teacher = copy.deepcopy(run.student).eval(), run.kind.teacher().eval()
    names = [alignment.student_module_name for alignment in run.built.alignments]
    with torch.no_grad(), watched(student, names) as own:
        student(**run.batch, use_cache=False) if "input_ids" in run.batch else student(**run.batch)
    with torch.no_grad(), ExitStack() as hooks:
        for number, alignment in enumerate(run.built.alignments):
            pieces = [alignment.projectors["input_projector"], alignment.projectors["output_projector"]]
            block = student.get_submodule(alignment.student_module_name)
            call = own[alignment.student_module_name]

            def replace(
                module: Any, args: Any, output: Any, call: Any = call, block: Any = block, p: Any = pieces
            ) -> Any:
                made = p[1](on_teachers_input(call, args[0], block, p[0]))
                return made if isinstance(output, torch.Tensor) else (made, *output[1:])

            handle = teacher.get_submodule(alignment.teacher_module_name).register_forward_hook(replace)
            hooks.callback(handle.remove)
            assert number < len(names)
        return teacher(**run.batch).logits


def test_blocks_in_the_teachers_place(run: Run) -> None:
    teacher = run.kind.teacher()
    loaded = load_student_with_projectors_from_checkpoint(teacher, run.checkpoint, "", run.kind.student(seed=7))
    assert loaded is teacher
    with torch.no_grad():
        logits = loaded.eval()(**run.batch).logits
        untouched = run.kind.teacher().eval()(**run.batch).logits
    torch.testing.assert_close(logits, by_hand(run), rtol=0, atol=1e-6)
    assert (logits - untouched).abs().max() > 1e-3


def test_generating_in_the_teachers_place(tmp_path: Path) -> None:
    run = Run("llama", tmp_path)
    loaded = load_student_with_projectors_from_checkpoint(
        run.kind.teacher(), run.checkpoint, "", run.kind.student(seed=7)
    ).eval()
    ids = run.batch["input_ids"][:1, :5]
    made = loaded.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    for length in range(5, 9):
        with torch.no_grad():
            assert made[0, length] == loaded(made[:, :length]).logits[0, -1].argmax()


def test_only_blockwise_checkpoints_go_into_the_teacher(run: Run, tmp_path: Path) -> None:
    content = json.loads((run.checkpoint / "alignments.json").read_text())
    (tmp_path / "alignments.json").write_text(json.dumps({**content, "distiller": "holistic"}))
    with pytest.raises(ConfigError, match="BlockwiseDistiller"):
        load_student_with_projectors_from_checkpoint(run.kind.teacher(), tmp_path, "", run.kind.student())
    for entry in content["alignments"][1:]:
        entry["student_model"] = "second"
    (tmp_path / "alignments.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="student_model_name"):  # of one student any name will do
        load_student_with_projectors_from_checkpoint(run.kind.teacher(), tmp_path, "another", run.kind.student())
    (tmp_path / "alignments.json").unlink()
    with pytest.raises(ConfigError, match=r"alignments\.json"):
        load_student_with_projectors_from_checkpoint(run.kind.teacher(), tmp_path, "", run.kind.student())


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_a_second_distiller_on_the_same_student(name: str, tmp_path: Path) -> None:
    """It begins as on a student that was only loaded: new projectors, nothing of the first run's."""
    kind = WIDTHS[name]
    student, teacher = kind.student(), kind.teacher()
    settings = {"max_steps": 3, "save_steps": 3}
    trained(distiller(name, student, teacher, tmp_path / "first", **settings))
    fresh = type(student).from_pretrained(tmp_path / "first" / "checkpoint-3")
    histories = []
    for number, model in enumerate((student, fresh)):
        built = distiller(name, model, teacher, tmp_path / str(number), **settings)
        histories.append([row["loss"] for row in trained(built) if "loss" in row])
    assert histories[0] == histories[1]
    for key, value in fresh.state_dict().items():
        assert torch.equal(value, student.state_dict()[key]), key


def test_two_students_side_by_side(tmp_path: Path) -> None:
    """Each learns what it would learn alone, and each has a directory of its own."""
    kind, teacher = WIDTHS["llama"], WIDTHS["llama"].teacher()
    students = {"a": kind.student(), "b": kind.student(seed=1)}
    alignments = [create_alignments(teacher, model, kind.modules) for model in students.values()]
    for name, aligned in zip(students, alignments, strict=True):
        for alignment in aligned:
            alignment.student_model_name = name
    settings = {
        "output_dir": str(tmp_path),
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "optim": "sgd",
        "max_grad_norm": 0,
    }
    built = BlockwiseDistiller(
        teacher_model=teacher,
        alignments=[*alignments[0], *alignments[1]],
        student_models=students,
        train_dataset=kind.data(16),
        args=training_arguments(silverspoon_ray, **settings),
    )
    rows = trained(built)
    assert {f"loss/{name}.model.layers.{i}" for name in "ab" for i in (0, 1)} <= rows[0].keys()
    for name, model in students.items():
        again = type(model).from_pretrained(tmp_path / "checkpoint-2" / f"student_model_{name}")
        for key, value in again.state_dict().items():
            assert torch.equal(value, model.state_dict()[key]), key
        loaded = load_student_with_projectors_from_checkpoint(
            kind.teacher(), tmp_path / "checkpoint-2", name, kind.student(seed=7)
        )
        assert first(loaded.eval()(**built.data_collator(kind.data(2))).logits).isfinite().all()
