"""Who may import whom: what is learned knows nothing of Ray, and the Ray layers know only those beneath them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "silverspoon_ray"
RAY_LAYERS = ("cluster", "train", "tune", "cli")
BENEATH = (
    "losses",
    "alignments",
    "capture",
    "nested",
    "files",
    "models",
    "teacher",
    "distillers",
    "errors",
    "training_arguments",
)
FORBIDDEN = {
    **{room: ("ray", *(f"silverspoon_ray.{layer}" for layer in RAY_LAYERS)) for room in BENEATH},
    "cluster": ("silverspoon_ray.train", "silverspoon_ray.tune", "silverspoon_ray.cli"),
    "train": ("silverspoon_ray.tune", "silverspoon_ray.cli"),
    "tune": ("silverspoon_ray.cli",),
}
CHECKED = [
    (room, path)
    for room in FORBIDDEN
    for path in [PACKAGE / f"{room}.py", *sorted((PACKAGE / room).rglob("*.py"))]
    if path.exists()
]


def imports(source: str, module: str) -> Iterator[str]:
    """Every dotted name that the source imports, wherever it does so: at the top, in functions, for type checkers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join([*parent, base] if base else parent)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def breaches(source: str, module: str, forbidden: tuple[str, ...]) -> list[str]:
    return [name for name in imports(source, module) if any(name == f or name.startswith(f"{f}.") for f in forbidden)]


@pytest.mark.parametrize(("room", "path"), CHECKED, ids=[str(path.relative_to(PACKAGE)) for _, path in CHECKED])
def test_import_rule(room: str, path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    found = breaches(path.read_text(encoding="utf-8"), module, FORBIDDEN[room])
    assert not found, f"{path.relative_to(ROOT)} imports {', '.join(found)}"


def test_all_rooms_are_checked() -> None:
    assert {room for room, _ in CHECKED} >= {"losses", "capture", "models", "teacher", "distillers", "cluster", "train"}
    rooms = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert rooms - set(FORBIDDEN) <= {"cli", "__init__", "__main__"}, "a new room needs a rule"


@pytest.mark.parametrize(
    "source",
    [
        "import ray",
        "import ray.train.torch as t",
        "from ray import train",
        "from ray.data import Dataset",
        "def f():\n    import ray",
        "if TYPE_CHECKING:\n    from silverspoon_ray.cluster import TeacherGroup",
        "from silverspoon_ray import cluster",
        "from .. import train",
        "from ..cluster.handle import TeacherHandle",
        "importlib.import_module('silverspoon_ray.cli.app')",
    ],
)
def test_the_check_sees_a_breach(source: str) -> None:
    assert breaches(source, "silverspoon_ray.losses.divergence", FORBIDDEN["losses"])


@pytest.mark.parametrize(
    "source", ["import raytracing", "from silverspoon_ray.training_arguments import x", "import re"]
)
def test_the_check_sees_no_breach_where_there_is_none(source: str) -> None:
    assert not breaches(source, "silverspoon_ray.losses.divergence", FORBIDDEN["losses"])


def test_a_distiller_is_used_without_ray() -> None:
    """Nor do transformers and accelerate import it for us."""
    code = (
        "import sys; import silverspoon_ray.distillers, silverspoon_ray.losses, silverspoon_ray.capture; "
        "import silverspoon_ray.models.source, silverspoon_ray.models.structure, silverspoon_ray.teacher.local; "
        "from silverspoon_ray import TrainingArguments; TrainingArguments(use_cpu=True); "
        "print([m for m in sys.modules if m == 'ray' or m.startswith('ray.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"
