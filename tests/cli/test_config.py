"""The YAML file: what it may say, what the command line changes, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from silverspoon_ray.cli import checks, hub
from silverspoon_ray.cli.checks import argument_keywords, data_files, validate
from silverspoon_ray.cli.config import load_config
from silverspoon_ray.cli.hub import model_source
from silverspoon_ray.errors import ConfigError, NotYetError, VocabularyError
from silverspoon_ray.models.source import RandomInit
from tests.cli.conftest import write_model


def refused(*overrides: str, path: str = "run.yaml") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        validate(load_config(path, overrides))
    return caught.value


def test_a_run_in_order(workplace: Path) -> None:
    run = load_config("run.yaml")
    validate(run)
    assert run.distiller == "response_based"
    assert run.data.train == ["text/*.txt"]
    assert run.data.packing is True
    assert (run.scaling.num_workers, run.scaling.use_gpu, run.run.max_failures) == (1, None, 0)
    assert model_source(run.teacher) == str(workplace / "teacher")
    expected = RandomInit(str(workplace / "teacher"), overrides={"num_hidden_layers": 1}, seed=0)
    assert model_source(run.student) == expected
    assert argument_keywords(run)["output_dir"] == str(workplace / "out")


@pytest.mark.parametrize("name", ["app", "checks", "config", "hub", "tables"])
def test_the_module_is_light(name: str) -> None:
    code = (
        f"import sys, silverspoon_ray.cli.{name}; print(sorted({{'torch', 'transformers', 'ray'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_overrides(workplace: Path) -> None:
    overrides = [
        "args.alpha=0.25",
        "args.teacher_placement.replicas=2",
        "data.train=[text/one.txt, text/two.txt]",
        "run.name=first",
        "scaling.num_workers=3",
        "teacher.init=random",
        "args.run_name=a=b",
        "distiller_kwargs={}",
    ]
    run = load_config("run.yaml", overrides)
    assert run.args["alpha"] == 0.25
    assert run.args["teacher_placement"] == {"replicas": 2}
    assert run.data.train == ["text/one.txt", "text/two.txt"]
    assert (run.run.name, run.scaling.num_workers) == ("first", 3)
    assert (run.teacher.path, run.teacher.init) == ("teacher", "random")
    assert run.args["run_name"] == "a=b"
    assert run.distiller_kwargs == {}
    assert run.args["max_steps"] == 2  # the rest is the file's


@pytest.mark.parametrize("override", ["args.alpha", "=3", "args..alpha=3", ".alpha=3"])
def test_an_override_of_the_wrong_form(workplace: Path, override: str) -> None:
    error = refused(override)
    assert (error.key, error.value) == ("override", override)


def test_an_override_below_a_value(workplace: Path) -> None:
    assert refused("data.tokenizer.name=3").key == "data.tokenizer.name"
    assert refused("args.alpha=[1").key == "args.alpha"


def test_empty_sections_are_sections(workplace: Path) -> None:
    (workplace / "run.yaml").write_text(
        "teacher: teacher\nstudent: teacher\nargs:\nrun:\ndata:\n  train: text\n  tokenizer: bytes\n"
    )
    run = load_config("run.yaml")
    validate(run)
    assert run.args == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("teacher: [1, 2\nstudent: x\n", "line 2"),
        ("teacher: a\nstudent: b\nteacher: c\n", "line 3"),
        ("args: {alpha: 1,\n  alpha: 2}", "line 2"),
        ("- a\n- b\n", "keys such as"),
        ("", "keys such as"),
        ("teacher: !!python/object:os.system {}\n", "line 1"),
        ("date: 2024-13-45\n", "month"),
    ],
)
def test_malformed_yaml(workplace: Path, text: str, said: str) -> None:
    (workplace / "bad.yaml").write_text(text)
    error = refused(path="bad.yaml")
    assert (error.key, error.value) == ("CONFIG", "bad.yaml")
    assert said in error.expected


def test_anchors_are_no_repeated_keys(workplace: Path) -> None:
    text = "base: &base {alpha: 0.5}\nargs: {<<: *base, max_steps: 3}\nagain: *base\n"
    (workplace / "anchors.yaml").write_text(text)
    assert refused(path="anchors.yaml").key == "base"  # unknown, but read


def test_a_file_that_cannot_be_read(workplace: Path) -> None:
    (workplace / "latin.yaml").write_bytes("teacher: \xe4\n".encode("latin-1"))
    for path in ("missing.yaml", "text", "latin.yaml"):
        error = refused(path=path)
        assert (error.key, error.value) == ("CONFIG", path)


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("teecher=x", "teecher", "teacher"),
        ("data.tokenzier=bytes", "data.tokenzier", "tokenizer"),
        ("student.overide={}", "student.overide", "overrides"),
        ("scaling.workers=2", "scaling.workers", "num_workers"),
        ("run.stroage_path=x", "run.stroage_path", "storage_path"),
        ("alpha=0.5", "alpha", "args"),
        ("data.max_length='512'", "data.max_length", "whole number"),
        ("data.max_length=1", "data.max_length", "2 or more"),
        ("data.packing=1", "data.packing", "true"),
        ("data.format=csv", "data.format", "parquet"),
        ("data.train=[]", "data.train", "directory"),
        ("data.train=[text, 3]", "data.train.1", "string"),
        ("data.train=3", "data.train", "directory"),
        ("data=3", "data", "section"),
        ("teacher=3", "teacher", "hub id"),
        ("teacher=null", "teacher", "required"),
        ("student.path=''", "student.path", "hub id"),
        ("student.init=zero", "student.init", "random"),
        ("scaling.num_workers=0", "scaling.num_workers", "1 or more"),
        ("scaling.num_workers=true", "scaling.num_workers", "1 or more"),
        ("scaling.use_gpu=maybe", "scaling.use_gpu", "true"),
        ("scaling.resources_per_worker.CPU=many", "scaling.resources_per_worker.CPU", "CPU"),
        ("run.max_failures=-2", "run.max_failures", "restarts"),
        ("run.num_to_keep=0", "run.num_to_keep", "1 or more"),
        ("args=3", "args", "TrainingArguments"),
    ],
)
def test_the_schema(workplace: Path, override: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml", [override])
    assert caught.value.key == key
    assert said in caught.value.expected


@pytest.mark.parametrize("name", ["sweep"])
def test_sections_to_come(workplace: Path, name: str) -> None:
    assert isinstance(refused(f"{name}={{}}"), NotYetError)


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("args.alpha=1.5", "args.alpha", "between 0"),
        ("args.alpa=0.5", "args.alpa", "alpha"),
        ("args.max_steps=many", "args.max_steps", "whole number"),
        ("args.max_steps=1.5", "args.max_steps", "whole number"),
        ("args.max_steps=0", "args.max_steps", "1 or more"),
        ("args.max_steps=null", "args.max_steps", "whole number"),
        ("args.bf16=1", "args.bf16", "true or false"),
        ("args.learning_rate=fast", "args.learning_rate", "number"),
        ("args.learning_rate=-1", "args.learning_rate", "0 or more"),
        ("args.per_device_train_batch_size=0", "args.per_device_train_batch_size", "1 or more"),
        ("args.save_strategy=sometimes", "args.save_strategy", "SaveStrategy"),
        ("args.eval_strategy=steps", "args.eval_strategy", "data.eval"),
        ("args.eval_on_start=true", "args.eval_on_start", "data.eval"),
        ("args.teacher_logits=topk", "args.teacher_logits", "top_k"),
        ("args.teacher_placement=shraded", "args.teacher_placement", "'sharded'"),
        ("args.teacher_placement.replicas=0", "args.teacher_placement.replicas", "1 or more"),
        ("args.teacher_placement.replica=1", "args.teacher_placement.replica", "replicas"),
        ("distiller=blockwise", "distiller_kwargs.soft_loss_fn", "unknown keyword"),
        ("distiller=reponse_based", "distiller", "response_based"),
        ("distiller_kwargs.soft_loss=x", "distiller_kwargs.soft_loss", "soft_loss_fn"),
        ("distiller_kwargs.soft_loss_fn=kl_divergense", "distiller_kwargs.soft_loss_fn", "kl_divergence"),
        ("distiller_kwargs.soft_loss_fn=3", "distiller_kwargs.soft_loss_fn", "name"),
        (
            "distiller_kwargs.soft_loss_fn_kwargs.temprature=2",
            "distiller_kwargs.soft_loss_fn_kwargs.temprature",
            "temperature",
        ),
        (
            "distiller_kwargs.soft_loss_fn_kwargs.temperature=0",
            "distiller_kwargs.soft_loss_fn_kwargs.temperature",
            "> 0",
        ),
        ("distiller_kwargs.output_head_layer=model.norm", "distiller_kwargs.output_head_layer", "nn.Linear"),
        ("teacher=nowhere/at/all", "teacher", "no such directory"),
        ("teacher=./text", "teacher", "config.json"),
        ("student.init=pretrained", "student.overrides", "random"),
        ("student.overrides.num_layers=1", "student.overrides.num_layers", "num_hidden_layers"),
        ("student.overrides.vocab_size=100", "data.tokenizer", "259"),
        ("data.tokenizer=./text", "data.tokenizer", "tokenizer.json"),
        ("data.tokenizer=no/such/directory", "data.tokenizer", "directory"),
        ("data.tokenizer=somebody/something", "data.tokenizer", "HF_HUB_OFFLINE"),
        ("teacher=not a model", "teacher", "hub id"),
        ("data.train=missing.txt", "data.train", "existing"),
        ("data.train=[text, 'missing*.txt']", "data.train", "pattern"),
        ("data.train=s3://bucket/file.txt", "data.train", "not built yet"),
        ("data.train=run.yaml", "data.train", ".parquet"),
        ("data.train=teacher/model.safetensors", "data.train", ".parquet"),
        ("data.eval=missing.txt", "data.eval", "existing"),
        ("data.format=parquet", "data.train", "Parquet"),
        ("data.format=json", "data.train", "JSON Lines"),
    ],
)
def test_values_that_cannot_work(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, override: str, key: str, said: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refused(override)
    assert error.key == key
    assert said in error.expected


def test_the_value_is_the_one_given(workplace: Path) -> None:
    assert refused("args.alpha=1.5").value == 1.5
    assert refused("data.train=[text, 'missing*.txt']").value == "missing*.txt"
    assert refused("args.save_strategy=sometimes").value == "sometimes"


def test_what_yaml_reads_differently(workplace: Path) -> None:
    (workplace / "text.yaml").write_text((workplace / "run.yaml").read_text().replace("alpha: 0.5", "alpha: 5e-1"))
    run = load_config("text.yaml", ["args.learning_rate=5e-5", "args.save_strategy=no", "args.eval_strategy=off"])
    validate(run)
    keywords = argument_keywords(run)
    assert (keywords["learning_rate"], keywords["alpha"]) == (5e-5, 0.5)
    assert (keywords["save_strategy"], keywords["eval_strategy"]) == ("no", "no")


def test_what_only_the_workers_have_is_not_refused(workplace: Path) -> None:
    validate(load_config("run.yaml", ["args.bf16=true", "args.use_cpu=false", "scaling.use_gpu=true"]))


def test_a_directory_without_weights(workplace: Path) -> None:
    write_model(workplace / "bare", weights=False)
    error = refused("teacher=bare")
    assert (error.key, error.value) == ("teacher", "bare")
    assert "init: random" in error.expected
    validate(load_config("run.yaml", ["teacher={path: bare, init: random}"]))


def test_models_that_cannot_be_built(workplace: Path) -> None:
    (workplace / "teacher" / "config.json").write_text("{")
    assert refused().key == "teacher"
    write_model(workplace / "unknown", model_type="perceptron9")
    assert refused("teacher=unknown", "student=unknown").key == "teacher"
    write_model(workplace / "nameless", architectures=None)
    error = refused("teacher={path: nameless, init: random}", "student=nameless")
    assert (error.key, error.value) == ("teacher", "nameless")
    assert "architectures" in error.expected


def test_vocabularies(workplace: Path) -> None:
    larger = load_config("run.yaml", ["student.overrides.vocab_size=512"])
    validate(larger)  # both hold every token of the tokenizer; the rest is padding
    models = {key: hub.meta_model(key, getattr(larger, key)).config for key in ("teacher", "student")}
    with pytest.raises(VocabularyError, match="259 and 512"):
        checks._check_vocabulary(larger, models, tokens=None)  # a tokenizer that is not here yet


def test_json_lines(workplace: Path) -> None:
    rows: list[dict[str, Any]] = [{"body": "some text", "n": 1}, {"body": None, "n": 2}]
    (workplace / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    validate(load_config("run.yaml", ["data.train=a.jsonl", "data.text_column=body"]))
    error = refused("data.train=a.jsonl", "data.text_column=bodi")
    assert (error.key, error.value) == ("data.text_column", "bodi")
    assert "body" in error.expected
    assert refused("data.train=a.jsonl", "data.text_column=n").key == "data.text_column"
    (workplace / "array.json").write_text(json.dumps(rows))
    assert "one object per line" in refused("data.train=array.json").expected
    (workplace / "broken.jsonl").write_text('{"body": "some')
    assert refused("data.train=broken.jsonl").key == "data.train"


def test_parquet(workplace: Path) -> None:
    pq.write_table(pa.table({"body": ["some text"], "n": [1]}), workplace / "a.parquet")
    validate(load_config("run.yaml", ["data.train=a.parquet", "data.text_column=body"]))
    error = refused("data.train=a.parquet", "data.text_column=bodi")
    assert (error.key, error.value) == ("data.text_column", "bodi")
    assert "body" in error.expected
    assert "int64" in refused("data.train=a.parquet", "data.text_column=n").expected


def test_text_that_is_no_text(workplace: Path) -> None:
    (workplace / "latin.txt").write_bytes(b"caf\xe9\n")
    assert "UTF-8" in refused("data.train=latin.txt").expected
    (workplace / "empty.txt").write_bytes(b"")
    assert "empty" in refused("data.train=empty.txt").expected
    # A character of two bytes, cut by the end of what is looked at.
    (workplace / "long.txt").write_text("x" + "é" * checks.PEEK_BYTES)
    validate(load_config("run.yaml", ["data.train=long.txt"]))


def test_files_of_a_directory(workplace: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", ".hidden.txt", "_SUCCESS", "b/.git/x.txt", "notes.md"):
        path = workplace / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    files, data_format = data_files("data.train", ["corpus", "text/one.txt"], "auto")
    names = [str(file.relative_to(workplace)) for file in files]
    assert names == ["corpus/a.txt", "corpus/b/1.txt", "corpus/b/2.txt", "text/one.txt"]
    assert data_format == "text"
    files, _ = data_files("data.train", ["corpus/**/*.md"], "text")
    assert [file.name for file in files] == ["notes.md"]
    (workplace / "corpus" / "c.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="one format"):
        data_files("data.train", ["corpus"], "auto")
    (workplace / "nothing").mkdir()
    with pytest.raises(ConfigError, match="a directory with files"):
        data_files("data.train", ["nothing"], "auto")


def test_a_hub_that_does_not_answer(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One question, within a limit, even if the network swallows it."""
    import threading

    import huggingface_hub

    asked = []
    released = threading.Event()

    def swallow(url: str, timeout: float) -> None:
        asked.append(url)
        released.wait(30)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", swallow)
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    hub._ask_hub.cache_clear()
    try:
        error = refused("teacher=somebody/something")
    finally:
        released.set()
        hub._ask_hub.cache_clear()
    assert (error.key, error.value) == ("teacher", "somebody/something")
    assert "did not answer within 0.2 s" in error.expected
    assert len(asked) == 1
