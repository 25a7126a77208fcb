"""What a distiller saves is a plain student, and a run that goes on from it is the run that was never interrupted."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller
from silverspoon_ray.errors import ConfigError
from tests.distillers.kinds import KINDS, Collator, gpt2, llama
from tests.distillers.ranks import on_ranks
from tests.support import seeded, token_data, trained, training_arguments, without_times

# ---- the student that is saved -----------------------------------------------------------------------------


def tied_llama(seed: int, layers: int) -> Any:
    config = llama(seed, layers).config
    config.tie_word_embeddings = True
    with seeded(seed):
        return type(llama(seed, layers))(config)


STUDENTS = {name: kind.model for name, kind in KINDS.items() if name != "perceptron"} | {"tied_llama": tied_llama}


def data_for(name: str) -> tuple[list[Any], Collator]:
    kind = "llama" if name == "tied_llama" else name
    return KINDS[kind].data(8, 1), Collator(kind)


@pytest.mark.parametrize("name", STUDENTS)
def test_saved_student_is_a_plain_directory(name: str, tmp_path: Path) -> None:
    student = STUDENTS[name](0, 1)
    data, collator = data_for(name)
    built = ResponseBasedDistiller(
        student,
        STUDENTS[name](5, 2),
        train_dataset=data,
        data_collator=collator,
        args=training_arguments(
            silverspoon_ray,
            output_dir=str(tmp_path / "run"),
            max_steps=2,
            save_strategy="steps",
            save_steps=2,
            remove_unused_columns=False,
        ),
    )
    trained(built)
    built.save_model(str(tmp_path / "final"))
    student.save_pretrained(tmp_path / "plain")
    batch = {key: value for key, value in collator(data).items() if key != "labels"}
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    wanted = student.eval()(**batch).logits
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for directory in (tmp_path / "run" / "checkpoint-2", tmp_path / "final"):
        assert load_file(directory / "model.safetensors").keys() == plain.keys()
        again = type(student).from_pretrained(directory).eval()
        assert again.state_dict().keys() == student.state_dict().keys()
        assert torch.equal(again(**batch).logits, wanted)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    student = tied_llama(0, 1)
    data, collator = data_for("tied_llama")
    args = training_arguments(silverspoon_ray, output_dir=str(tmp_path), max_steps=1)
    built = ResponseBasedDistiller(student, llama(5, 2), train_dataset=data, data_collator=collator, args=args)
    trained(built)
    built.save_model(str(tmp_path))
    again = type(student).from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, student.lm_head.weight)


def test_nothing_has_to_be_unpickled(tmp_path: Path) -> None:
    data, collator = data_for("llama")
    built = ResponseBasedDistiller(
        llama(0, 1),
        llama(5, 2),
        train_dataset=data,
        data_collator=collator,
        args=training_arguments(
            silverspoon_ray,
            output_dir=str(tmp_path),
            max_steps=2,
            save_strategy="steps",
            save_steps=1,
            alpha=0.25,
            hub_token="a secret",
        ),
    )
    trained(built)
    built.save_model(str(tmp_path / "final"))
    checkpoint = tmp_path / "checkpoint-2"
    assert not list(tmp_path.rglob("*.bin"))
    assert not list(tmp_path.rglob("*.partial"))
    for directory in (checkpoint, tmp_path / "final"):
        saved = json.loads((directory / "training_args.json").read_text())
        assert saved["alpha"] == 0.25
        assert saved["max_steps"] == 2
        assert "a secret" not in (directory / "training_args.json").read_text()
    assert json.loads((checkpoint / "data_position_0.json").read_text()).keys() == {"python", "numpy", "torch"}
    torch.load(checkpoint / "optimizer.pt", weights_only=True)
    torch.load(checkpoint / "scheduler.pt", weights_only=True)


# ---- going on ----------------------------------------------------------------------------------------------


class RandomCollator:
    """Replaces and ignores tokens at random, from torch's, NumPy's and Python's global generators."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.stack([sample["input_ids"] for sample in samples])
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
        ids = ids.clone()
        ids[:, int(np.random.randint(ids.shape[1]))] = random.randrange(1, 64)
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def distiller(directory: str, dataset: str, accumulation: int, **keywords: Any) -> ResponseBasedDistiller:
    """24 samples in batches of 2, for 10 steps; a data stream is long enough for all of them."""
    stream = dataset == "stream"
    data = token_data(80 if stream else 24, length=8)
    return ResponseBasedDistiller(
        gpt2(0, 1, dropout=0.2),
        gpt2(5, 2),
        train_dataset=Stream(data) if stream else data,
        eval_dataset=token_data(4, length=8, seed=9),
        data_collator=RandomCollator(),
        args=training_arguments(
            silverspoon_ray,
            output_dir=directory,
            max_steps=10,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation,
            alpha=0.4,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            **keywords,
        ),
    )


def history_of(built: ResponseBasedDistiller, **train: Any) -> list[dict[str, Any]]:
    return without_times(trained(built, **train))


@functools.cache
def undisturbed(directory: Path, dataset: str, accumulation: int) -> list[dict[str, Any]]:
    history = history_of(distiller(str(directory), dataset, accumulation))
    assert len({row["loss"] for row in history if "loss" in row}) == 10
    return history


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


def check_same(resumed: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """Bit-equal, row for row; only the summary at the end speaks of the resumed part alone."""

    def rows(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in history if "train_loss" not in row]

    assert rows(resumed) == rows(whole)


@pytest.mark.parametrize("step", [1, 2, 5, 6, 7, 9])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dataset", ["map", "stream"])
def test_resumed_run_is_the_undisturbed_run(
    dataset: str, accumulation: int, step: int, directory: Path, tmp_path: Path
) -> None:
    """With accumulation 2 the map-style set has epochs of 6 steps: 6 is an epoch's end, 7 is in the second."""
    whole = directory / f"{dataset}{accumulation}"
    history = undisturbed(whole, dataset, accumulation)
    resumed = distiller(str(tmp_path), dataset, accumulation)
    check_same(history_of(resumed, resume_from_checkpoint=str(whole / f"checkpoint-{step}")), history)


def test_resumed_twice(directory: Path, tmp_path: Path) -> None:
    history = undisturbed(directory / "map2", "map", 2)
    first = distiller(str(tmp_path / "first"), "map", 2)
    history_of(first, resume_from_checkpoint=str(directory / "map2" / "checkpoint-2"))
    second = distiller(str(tmp_path / "second"), "map", 2)
    check_same(history_of(second, resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4")), history)


def test_another_data_seed_gives_other_masks(directory: Path, tmp_path: Path) -> None:
    """Or equal histories would not show that masks are drawn."""
    history = undisturbed(directory / "stream2", "stream", 2)
    other = history_of(distiller(str(tmp_path), "stream", 2, data_seed=7))
    assert other[0]["loss"] != history[0]["loss"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"python": 1, "numpy": 2, "torch": "3"}',
        "torch: too short",
        "torch: not base64",
        "numpy: too short",
        "python: too short",
    ],
)
def test_broken_data_position(content: str, directory: Path, tmp_path: Path) -> None:
    undisturbed(directory / "map2", "map", 2)
    broken = tmp_path / "checkpoint-2"
    shutil.copytree(directory / "map2" / "checkpoint-2", broken)
    path = broken / "data_position_0.json"
    saved = json.loads(path.read_text())
    if content == "torch: too short":
        content = json.dumps({**saved, "torch": saved["torch"][:100]})
    elif content == "torch: not base64":
        content = json.dumps({**saved, "torch": "?" + saved["torch"][1:]})
    elif content == "numpy: too short":
        content = json.dumps({**saved, "numpy": [saved["numpy"][0], saved["numpy"][1][:5], *saved["numpy"][2:]]})
    elif content == "python: too short":
        content = json.dumps({**saved, "python": [3, [1, 2, 3], None]})
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"data_position_0\.json.*broken"):
        trained(distiller(str(tmp_path / "run"), "map", 2), resume_from_checkpoint=str(broken))


def test_checkpoint_of_a_plain_trainer(directory: Path, tmp_path: Path) -> None:
    """Without a data position a run goes on all the same: its collator's numbers start anew."""
    undisturbed(directory / "map2", "map", 2)
    shutil.copytree(directory / "map2" / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "data_position_0.json").unlink()
    history = trained(distiller(str(tmp_path), "map", 2), resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [row["step"] for row in history if "loss" in row] == list(range(1, 11))


# ---- two ranks ---------------------------------------------------------------------------------------------


def resume_on_a_rank(directory: str) -> list[list[dict[str, Any]]]:
    histories = []
    for dataset in ("map", "stream"):
        whole = f"{directory}/{dataset}"
        histories.append(history_of(distiller(whole, dataset, 2)))
        resumed = distiller(f"{directory}/{dataset}-resumed", dataset, 2)
        histories.append(history_of(resumed, resume_from_checkpoint=f"{whole}/checkpoint-4"))
    return histories


def test_two_ranks(tmp_path: Path) -> None:
    for histories in on_ranks(resume_on_a_rank, str(tmp_path)):
        check_same(histories[1], histories[0])
        check_same(histories[3], histories[2])
