"""The public names are a promise: adding or losing one is a decision, made here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import silverspoon_ray

ROOT = Path(__file__).parent.parent
NAMES = {
    "Alignment",
    "BaseDistiller",
    "BlockwiseDistiller",
    "ContrastiveDistillationLoss",
    "DistillationTrainer",
    "Distiller",
    "GenericConv2dProjector",
    "GenericLinearProjector",
    "HolisticDistiller",
    "ModuleCaptureEngine",
    "OutputSelector",
    "RandomInit",
    "ResponseBasedDistiller",
    "SilentProgressCallback",
    "TeacherGroup",
    "TeacherHandle",
    "TeacherPlacement",
    "TrainingArguments",
    "create_alignments",
    "freeze_parameters",
    "fuse_projectors_into_module",
    "get_loss_function",
    "jsd_loss",
    "kl_divergence_loss",
    "load_student_weights_from_checkpoint",
    "load_student_with_projectors_from_checkpoint",
    "partial_summarize_layer_names",
    "prune_model",
    "reconfig_model",
    "summarize_layer_names",
}


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names() -> None:
    assert set(silverspoon_ray.__all__) == NAMES
    assert len(silverspoon_ray.__all__) == len(NAMES)
    assert sorted(silverspoon_ray.__all__) == silverspoon_ray.__all__


@pytest.mark.parametrize("name", sorted(NAMES))
def test_importable(name: str) -> None:
    value = getattr(silverspoon_ray, name)
    assert callable(value)
    assert getattr(value, "__name__", name) == name
    assert value.__doc__
    assert name in dir(silverspoon_ray)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        silverspoon_ray.NoSuchThing  # noqa: B018


def test_importing_the_package_is_cheap() -> None:
    """The command line answers a misspelt key without waiting for torch."""
    heavy = run(
        "import sys, silverspoon_ray; print(silverspoon_ray.__version__); "
        "print(*[m for m in ('torch', 'transformers', 'ray', 'numpy') if m in sys.modules])"
    )
    assert heavy == silverspoon_ray.__version__


def test_star_import_gives_the_public_names() -> None:
    names = run("from silverspoon_ray import *; print(*sorted(n for n in dir() if not n.startswith('_')))")
    assert set(names.split()) == NAMES
