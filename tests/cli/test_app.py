"""The commands: what they print, and the exit code."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

from silverspoon_ray.cli import app
from silverspoon_ray.cli.app import main
from silverspoon_ray.errors import ConfigError, PlacementError
from silverspoon_ray.train.text_data import PadCollator
from tests.cli.conftest import LLAMA, run_tree, write_run
from tests.cli.head import RAY, ray_head
from tests.support import llama


@dataclass
class FakeCheckpoint:
    path: str = "/runs/first/checkpoint_1"


@dataclass
class FakeResult:
    metrics: dict[str, Any] = field(default_factory=lambda: {"loss": 1.25, "eval_loss": 2.5, "step": 2, "note": "text"})
    checkpoint: FakeCheckpoint | None = field(default_factory=FakeCheckpoint)
    path: str = "/runs/first"


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stands for DistillationTrainer and for Ray: keeps the arguments; ``outcome`` is returned or raised."""
    import silverspoon_ray.train.trainer

    class FakeTrainer:
        outcome: Any = FakeResult()
        calls: list[tuple[Any, ...]] = []  # noqa: RUF012

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.calls.append((args, kwargs))

        def fit(self) -> Any:
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome

    monkeypatch.setattr(silverspoon_ray.train.trainer, "DistillationTrainer", FakeTrainer)
    monkeypatch.setattr(app, "_ray", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(app, "_dataset", lambda split, entries, run: (split, tuple(entries)))
    yield FakeTrainer
    FakeTrainer.calls.clear()


def test_train(workplace: Path, trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["args.eval_strategy=steps", "data.eval=text/two.txt", "run.name=first", "run.max_failures=2"]
    overrides += [
        "scaling={num_workers: 2, use_gpu: false, resources_per_worker: {CPU: 0.5}}",
        "args.learning_rate=1e-3",
    ]
    assert main(["train", "run.yaml", *overrides]) == 0
    ((args, kwargs),) = trainer.calls
    assert args == ("response_based",)
    assert kwargs["teacher"] == str(workplace / "teacher")
    assert kwargs["student"].overrides == {"num_hidden_layers": 1}
    assert kwargs["args"]["output_dir"] == str(workplace / "out")
    assert (kwargs["args"]["alpha"], kwargs["args"]["learning_rate"]) == (0.5, 1e-3)
    assert kwargs["train_dataset"] == ("train", ("text/*.txt",))
    assert kwargs["eval_dataset"] == ("eval", ("text/two.txt",))
    assert kwargs["distiller_kwargs"]["soft_loss_fn_kwargs"] == {"temperature": 2.0}
    assert kwargs["data_collator"] == PadCollator(0)
    assert len(kwargs["processing_class"]) == 259
    scaling, run = kwargs["scaling_config"], kwargs["run_config"]
    assert (scaling.num_workers, scaling.use_gpu, scaling.resources_per_worker) == (2, False, {"CPU": 0.5})
    assert (run.name, run.storage_path, run.failure_config.max_failures) == ("first", str(workplace / "out"), 2)

    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["loss", "1.25"] in rows
    assert ["eval_loss", "2.5"] in rows
    assert "note" not in out
    assert "checkpoint: /runs/first/checkpoint_1/checkpoint\n" in out
    assert out.endswith("run: /runs/first\n")
    assert "\x1b" not in out


def test_the_defaults_are_the_trainers(workplace: Path, trainer: Any) -> None:
    trainer.outcome = FakeResult(checkpoint=None)
    assert main(["train", "run.yaml", "data.packing=false"]) == 0
    ((_, kwargs),) = trainer.calls
    assert kwargs["scaling_config"] is None
    assert kwargs["eval_dataset"] is None
    assert kwargs["run_config"].checkpoint_config.num_to_keep is None


def failure() -> ray.train.WorkerGroupError:
    return ray.train.WorkerGroupError(
        "[Rank 0 Error Snippet]:\nTraceback: many lines", {0: ValueError("no way\nat all")}
    )


def test_a_run_that_fails(workplace: Path, trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.outcome = failure()
    assert main(["train", "run.yaml"]) == 1
    log = workplace / "out" / "failure.log"
    assert capsys.readouterr().err == f"error: ValueError: no way (log: {log})\n"
    assert "Traceback: many lines" in log.read_text()

    assert main(["train", "run.yaml", "--debug"]) == 1
    assert "Traceback: many lines" in capsys.readouterr().err


def test_places_that_are_not_to_be_had(workplace: Path, trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.outcome = PlacementError("no room", needed={"GPU": 8}, available={"GPU": 1}, total={"GPU": 2}, waited_s=3)
    assert main(["train", "run.yaml"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "needed 8 GPU; free 1 GPU; cluster has 2 GPU" in line


def test_a_mistake_that_only_a_worker_notices(
    workplace: Path, trainer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.outcome = ray.train.WorkerGroupError("", {0: ConfigError("args.x", "y" * 1000, "something\nshorter")})
    assert main(["train", "run.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: args.x='yyy")
    assert line.endswith("...: something shorter")
    assert len(line) < 300


def test_a_failure_that_cannot_be_logged(workplace: Path, trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.outcome = failure()
    (workplace / "out").write_text("a file where the directory should be")
    assert main(["train", "run.yaml"]) == 1
    assert capsys.readouterr().err == "error: ValueError: no way\n"


def test_interrupted(workplace: Path, trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    trainer.fit = interrupt
    assert main(["train", "run.yaml"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted"


def test_check(workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ray, "init", lambda **kwargs: pytest.fail("check starts nothing"))
    overrides = ["args.teacher_placement={replicas: 2, device_type: cuda, resources_per_device: {node: 0.5}}"]
    overrides += ["scaling={num_workers: 3, use_gpu: true, resources_per_worker: {CPU: 2}}"]
    assert main(["check", "run.yaml", *overrides]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "\x1b" not in out
    teacher = f"{llama_parameters(layers=2):,}"
    student = f"{llama_parameters(layers=1):,}"
    source = workplace / "teacher"
    assert f"teacher {source} LlamaForCausalLM {teacher} 259 saved" in lines
    assert f"student {source} LlamaForCausalLM {student} 259 random, seed 0" in lines
    assert "logits teacher's logits kl_divergence(temperature=2.0) 0.5" in lines
    assert "teacher (pp, 2 x 1 device(s)) 2 1 GPU, 0.5 node 2 GPU, 1 node" in lines
    assert "student worker 3 2 CPU, 1 GPU 6 CPU, 3 GPU" in lines
    assert "sum 5 GPU, 1 node, 6 CPU" in lines
    assert f"train {workplace / 'text' / 'two.txt'} 38 B" in lines
    assert any(line.startswith("train together: 2 file(s), text") for line in lines)


def test_check_shows_alignments(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["distiller=blockwise", "distiller_kwargs={}", "args.alpha=0"]
    pairs = r"alignments={modules: {'model\.layers\.1': 'model\.layers\.0'}, loss_function: cosine}"
    assert main(["check", "run.yaml", *overrides, pairs, "student.overrides.hidden_size=16"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    expected = "model.layers.1 (LlamaDecoderLayer) model.layers.0 (LlamaDecoderLayer) [..., 32] -> [..., 16] cosine 1"
    assert any(line.startswith(expected) for line in lines), lines


def llama_parameters(layers: int) -> int:
    model = llama(width=32, layers=layers, vocabulary=259, num_attention_heads=2, num_key_value_heads=2)
    return sum(parameter.numel() for parameter in model.parameters())


def test_check_counts_many_files_together(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(30):
        (workplace / "text" / f"{i:02}.txt").write_text("0123456789")
    assert main(["check", "run.yaml", "data.train=text/[0-9]*.txt"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "train and 10 more 100 B" in lines
    assert "train together: 30 file(s), text 300 B" in lines
    assert "teacher (a copy in every student worker) 0 nothing of its own nothing" in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["sweep", "run.yaml"], "sweep"), (["train"], "CONFIG"), (["train", "run.yaml", "--adress=x"], "--adress")],
)
def test_a_command_line_that_is_none(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("quickstart", "train", "check", "cache"))
    assert not any(command in shown for command in ("sweep", "report"))


def test_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = types.ModuleType("silverspoon_ray.cli.quickstart")
    given: list[Path] = []
    module.run_quickstart = given.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(app, "_ray", lambda address: contextlib.nullcontext())
    monkeypatch.chdir(tmp_path)
    assert main(["quickstart", "--output-dir", "here"]) == 0
    assert given == [tmp_path / "here"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1"])
def test_a_cluster_that_is_not_there(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **kwargs: pytest.fail("nobody answers there"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")  # so that it is put back afterwards
    assert main(["train", "run.yaml", "--address", address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --address='{address}': ")


@pytest.mark.cluster
def test_a_real_run(ray_cluster: Any, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"width": 32, "vocabulary": 259, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama(layers=2, **shape).save_pretrained(workplace / "teacher")
    overrides = ["args.save_strategy=steps", "args.save_steps=2", "args.logging_steps=1", "data.eval=text/two.txt"]
    overrides += [
        "args.eval_strategy=steps",
        "args.eval_steps=2",
        "args.teacher_placement.replicas=1",
        "run.name=first",
    ]
    assert main(["train", "run.yaml", *overrides]) == 0
    shown = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if len(line.split()) == 2)
    assert float(shown["step"]) == 2
    assert float(shown["eval_loss"]) > 0
    assert Path(shown["run:"].strip()) == workplace / "out" / "first"
    checkpoint = Path(shown["checkpoint:"].strip())
    assert (checkpoint / "config.json").is_file()
    import transformers

    student = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert student.config.num_hidden_layers == 1
    assert len(transformers.AutoTokenizer.from_pretrained(checkpoint)) == 259


@pytest.mark.cluster
def test_a_real_run_with_features(ray_cluster: Any, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"width": 32, "vocabulary": 259, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama(layers=2, **shape).save_pretrained(workplace / "teacher")
    overrides = ["distiller=blockwise", "distiller_kwargs={}", "args.alpha=0", "args.save_strategy=steps"]
    overrides += ["student.overrides.hidden_size=16", "args.teacher_placement.replicas=1", "args.logging_steps=1"]
    overrides += [r"alignments={modules: {'model\.layers\.1': 'model\.layers\.0'}}", "args.save_steps=2"]
    assert main(["train", "run.yaml", *overrides]) == 0
    shown = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if len(line.split()) == 2)
    assert float(shown["loss"]) > 0
    checkpoint = Path(shown["checkpoint:"].strip())
    assert (checkpoint / "projectors.safetensors").is_file()
    import transformers

    assert transformers.AutoModelForCausalLM.from_pretrained(checkpoint).config.hidden_size == 16


@pytest.mark.cluster
def test_too_little_text(ray_cluster: Any, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.yaml", "data.train=text/two.txt", "data.max_length=100"]) == 2
    assert "error: data.train=['text/two.txt']: text of at least data.max_length=100 tokens" in capsys.readouterr().err


@pytest.mark.cluster
def test_a_submitted_job(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As in the README: absolute paths, so that the working directory of the cluster does not matter."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    tree = run_tree()
    tree["teacher"] = {"path": str(workplace / "teacher"), "init": "random"}
    tree["student"]["path"] = str(workplace / "teacher")
    tree["args"]["output_dir"] = str(workplace / "out")
    tree["data"]["train"] = str(workplace / "text")
    config = write_run(workplace, tree)
    train = [sys.executable, "-m", "silverspoon_ray", "train"]
    with ray_head(elsewhere) as head:
        submit = [RAY, "job", "submit", "--address", head.dashboard, "--", *train]

        def job(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [*submit, *arguments]
            return subprocess.run(
                command, cwd=elsewhere, env=head.environment, capture_output=True, text=True, timeout=200
            )

        done = job(str(config), "args.teacher_placement.replicas=1", "run.name=first")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"\nrun: {workplace / 'out' / 'first'}\n" in done.stdout
        (checkpoint,) = [line for line in done.stdout.splitlines() if line.startswith("checkpoint: ")]
        assert (Path(checkpoint.removeprefix("checkpoint: ")) / "config.json").is_file()

        done = job("run.yaml")  # it is not in the cluster's working directory
        assert done.returncode == 1
        assert "error: CONFIG='run.yaml': a YAML file that can be read" in done.stdout + done.stderr
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("strategy", ["pp", "tp", "sharded"])
def test_check_shows_the_teachers_layout(strategy: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "teacher" / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 260}))
    placement = f"args.teacher_placement={{strategy: {strategy}, num_devices: 2}}"
    assert main(["check", "run.yaml", placement, "student.overrides.vocab_size=260"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    if strategy == "pp":
        assert any(line.startswith("stage 0 model.layers.0, model.embed_tokens ") for line in lines), lines
        assert any(line.startswith("stage 1 model.layers.1, lm_head, model.norm") for line in lines)
    else:
        assert [line for line in lines if line.startswith("rank 1 1/2 of each layer")]
    assert f"token {4 * 260 / 1024:.4g} KiB" in lines


@pytest.mark.parametrize(
    ("form", "size"), [("hidden", 4 * 32), ("top_k", 2 * 8 + 4 * 9), ("sampled", 6 * 8), ("full", 2 * 260)]
)
def test_check_shows_what_travels(form: str, size: int, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "teacher" / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 260}))
    settings = [f"args.teacher_logits={form}", "args.teacher_top_k=8", "student.overrides.vocab_size=260"]
    settings += ["args.teacher_wire_dtype=bfloat16"] if form == "full" else []
    assert main(["check", "run.yaml", "args.teacher_placement={num_devices: 1}", *settings]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"token {size} B" in lines, lines


LAYOUT_MISTAKES = [
    ("{num_devices: 3}", "args.teacher_placement.num_devices=3", "at most 2"),
    ("{strategy: tp, num_devices: 4}", "args.teacher_placement.num_devices=4", "num_attention_heads=2"),
    ("{strategy: sharded, num_devices: 2, wrap_cls: Layer}", "args.teacher_placement.wrap_cls='Layer'", "LlamaDecoder"),
    ("{num_devices: 2, wrap_cls: Layer}", "args.teacher_placement.wrap_cls='Layer'", "sharded"),
]


@pytest.mark.parametrize(("placement", "key", "said"), LAYOUT_MISTAKES, ids=[case[0] for case in LAYOUT_MISTAKES])
def test_a_layout_that_cannot_be(
    placement: str, key: str, said: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.yaml", f"args.teacher_placement={placement}"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: {key}: ")
    assert said in line
