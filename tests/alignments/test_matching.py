"""Patterns over module names: what they pair, in which order, and what is said where they match nothing."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from silverspoon_ray import Alignment, OutputSelector, create_alignments
from silverspoon_ray.alignments import described
from silverspoon_ray.errors import AlignmentError, ConfigError
from silverspoon_ray.losses import CosineLoss, MSELoss
from silverspoon_ray.models.structure import structure_of
from tests.support import bert_mlm, llama


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(2, 2), nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(2, 4)


TEACHER, STUDENT = Model(12), Model(6)


def pairs(modules: Any) -> list[tuple[str, str]]:
    return [(a.teacher_module_name, a.student_module_name) for a in create_alignments(TEACHER, STUDENT, modules)]


@pytest.mark.parametrize(
    ("modules", "wanted"),
    [
        (r"layers\.1", [("layers.1", "layers.1")]),  # not layers.10, not layers.1.mlp
        ("embed|head", [("embed", "embed"), ("head", "head")]),
        (["head", "embed"], [("embed", "embed"), ("head", "head")]),  # in the order of the teacher's modules
        ([r"layers\.[12]", r"layers\.2"], [("layers.1", "layers.1"), ("layers.2", "layers.2")]),  # each pair once
        (r"layers\.[01]\.mlp", [("layers.0.mlp", "layers.0.mlp"), ("layers.1.mlp", "layers.1.mlp")]),
        ({r"layers\.11": r"layers\.5"}, [("layers.11", "layers.5")]),
        ({"layers.11": "layers.5"}, [("layers.11", "layers.5")]),
        ({r"layers\.1(\d)": r"layers\.\1"}, [("layers.10", "layers.0"), ("layers.11", "layers.1")]),
        (
            {r"layers\.1(?P<n>\d)\.(?P<part>\w+)": r"layers\.\g<n>\.\g<part>"},
            [(f"layers.1{n}.{part}", f"layers.{n}.{part}") for n in (0, 1) for part in ("attention", "mlp")],
        ),
        (
            {r"layers\.(2|5|8)": r"layers\.[135]"},
            [("layers.2", "layers.1"), ("layers.5", "layers.3"), ("layers.8", "layers.5")],
        ),
        ({r"layers\.[34]": r"layers\.0"}, [("layers.3", "layers.0"), ("layers.4", "layers.0")]),
        ({r"layers\.1": r"layers\.0", "head": "head"}, [("layers.1", "layers.0"), ("head", "head")]),
        ({r"layers\.11\.mlp": r"layers\.5\.attention"}, [("layers.11.mlp", "layers.5.attention")]),
    ],
)
def test_pairs(modules: Any, wanted: list[tuple[str, str]]) -> None:
    assert pairs(modules) == wanted


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (r"layer\.1", ["'layer\\\\.1'", "layers.1", "teacher"]),
        ("heads", ["head"]),
        ("layers", []),  # the list itself matches: it is a module, too
        ({r"layers\.3": r"layer\.0"}, ["student", "layers.0"]),
        (r"layers\.11", ["'layers.11' is not", "mapping"]),
        ({r"layers\.(1|2|3)": r"layers\.[01]"}, ["matches 2", "3", r"\1"]),
        ({r"layers\.1": r"layers\.\1"}, ["no group 1"]),
        ({r"layers\.1": r"layers\.\g<n>"}, ["no group n"]),
        (r"layers\.(", ["regular expression"]),
        ([], ["at least one pattern"]),
        ({}, ["at least one pattern"]),
        ([3], ["strings"]),
        ("zzzz", ["embed"]),
    ],
    ids=str,
)
def test_mistakes(modules: Any, said: list[str]) -> None:
    if not said:
        assert pairs(modules) == [("layers", "layers")]
        return
    with pytest.raises(AlignmentError) as refused:
        pairs(modules)
    for part in said:
        assert part in str(refused.value)


def test_every_keyword_reaches_every_alignment() -> None:
    made = create_alignments(
        TEACHER,
        STUDENT,
        r"layers\.[012]",
        loss_function="cosine",
        loss_function_kwargs={"dim": 1},
        output_selector_index=2,
        auto_projector=False,
        projector_init="xavier",
        max_grad_norm=0.5,
    )
    assert len(made) == 3
    for number, alignment in enumerate(made):
        assert alignment.teacher_block is TEACHER.layers[number]
        assert alignment.student_block is STUDENT.layers[number]
        assert alignment.loss_function == CosineLoss(dim=1)
        assert alignment.teacher_output_selector == alignment.student_output_selector == OutputSelector(2)
        assert (alignment.auto_projector, alignment.projector_init, alignment.max_grad_norm) == (False, "xavier", 0.5)
        assert alignment.loss_weight == 1.0
    assert create_alignments(TEACHER, STUDENT, "head")[0].loss_function == MSELoss()
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        create_alignments(TEACHER, STUDENT, "head", loss_function="cosin")


class Handle:
    """What a teacher elsewhere shows of itself."""

    structure = structure_of(llama(0, 16, 4))


def test_names_of_models() -> None:
    """Of a remote teacher the structure is looked at; a hub id is a model's name, of a directory its last part."""
    student = llama(0, 16, 2)
    student.name_or_path = "/data/models/small/"
    made = create_alignments(Handle(), student, {r"model\.layers\.3": r"model\.layers\.1"})
    assert made[0].teacher_block is Handle.structure.model.layers[3]
    assert made[0].get_name() == "small.model.layers.1"
    student.name_or_path = "org/small"
    assert create_alignments(Handle(), student, "lm_head")[0].get_name() == "org/small.lm_head"
    with pytest.raises(ConfigError, match="teacher_model"):
        create_alignments("llama", student, "lm_head")
    with pytest.raises(ConfigError, match="student_model"):
        create_alignments(student, Handle, "lm_head")


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs, shapes as far as they are known, losses, weights, projectors."""
    student, teacher = bert_mlm(0, 16, 2), bert_mlm(5, 24, 4)
    names = {r"bert\.encoder\.layer\.[13]": r"bert\.encoder\.layer\.[01]"}
    made = create_alignments(teacher, student, names, loss_function="cosine")
    made[1].loss_weight = 2.5
    text = made.describe()
    assert capsys.readouterr().out.rstrip("\n") == text == described(made)
    rows = text.splitlines()
    assert len(rows) == 4
    for part in (
        "bert.encoder.layer.1 (BertLayer)",
        "bert.encoder.layer.0 (BertLayer)",
        "cosine",
        "made if shapes differ",
    ):
        assert part in rows[2]
    assert " 2.5 " in rows[3]

    def own(student: Any, teacher: Any) -> Any:
        return (student - teacher).abs().mean()

    by_hand = Alignment(nn.Linear(4, 8), nn.Conv2d(3, 5, 1), loss_function=own, output_projector=nn.Linear(5, 8))
    row = described([by_hand]).splitlines()[-1]
    for part in ("[..., 8] -> [..., 5]", "own", "output 5->8"):
        assert part in row
