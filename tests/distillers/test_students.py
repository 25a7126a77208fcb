"""Kinds of training: gradient checkpointing, frozen parts, LoRA, models of one's own."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller
from silverspoon_ray.errors import ConfigError
from tests.distillers.kinds import (
    KINDS,
    NO_PADDING,
    Collator,
    Padding,
    batch_losses,
    gpt2,
    kl,
    llama,
    mean_squared,
)
from tests.support import PrinterCallback, seeded, trained, training_arguments


def distiller(
    name: str,
    student: Any,
    padding: Padding = NO_PADDING,
    teacher: Any = None,
    data_collator: Any = None,
    compute_loss_func: Any = None,
    **keywords: Any,
) -> ResponseBasedDistiller:
    built = ResponseBasedDistiller(
        student,
        teacher or KINDS[name].model(5, 2),
        train_dataset=KINDS[name].data(24, 1),
        eval_dataset=KINDS[name].data(11, 2),
        data_collator=data_collator or Collator(name, padding),
        soft_loss_fn=mean_squared if name == "bert_regression" else None,
        args=training_arguments(
            silverspoon_ray,
            **{
                "max_steps": 3,
                "per_device_train_batch_size": 8,
                "remove_unused_columns": False,
                "alpha": 0.5,
                **keywords,
            },
        ),
        compute_loss_func=compute_loss_func,
    )
    built.remove_callback(PrinterCallback)
    return built


def losses(history: list[dict[str, Any]], key: str = "loss") -> list[float]:
    return [row[key] for row in history if key in row]


# ---- gradient checkpointing ----------------------------------------------------------------------------------


def dropping(seed: int, layers: int) -> Any:
    return gpt2(seed, layers, dropout=0.2)


CHECKPOINTED = {"llama": llama, "gpt2": dropping, "bert_mlm": KINDS["bert_mlm"].model, "t5": KINDS["t5"].model}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing(name: str, accumulation: int) -> None:
    """The same numbers, with every layer run a second time; the teacher's layers run once."""
    runs = {}
    for checkpointing in (False, True):
        student = CHECKPOINTED[name](0, 2)
        calls = [0]
        layer = next(module for key, module in student.named_modules() if key.endswith(".0"))
        norm = next(module for module in layer.modules() if "Norm" in type(module).__name__)

        def count(module: Any, args: Any, calls: list[int] = calls) -> None:
            calls[0] += torch.is_grad_enabled()  # not when the student's head is tried out, before the first step

        norm.register_forward_pre_hook(count)
        settings = {"gradient_checkpointing": checkpointing, "gradient_accumulation_steps": accumulation}
        if checkpointing:
            settings["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
        built = distiller(name, student, per_device_train_batch_size=4, **settings)
        runs[checkpointing] = (trained(built), calls[0], built.student_model.state_dict())
    assert losses(runs[True][0]) == pytest.approx(losses(runs[False][0]), rel=1e-6)
    assert losses(runs[True][0], "grad_norm") == pytest.approx(losses(runs[False][0], "grad_norm"), rel=1e-5)
    assert runs[False][1] == 3 * accumulation
    assert runs[True][1] == 2 * runs[False][1], "nothing was checkpointed"


# ---- frozen parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["first", "last", "embeddings"])
@pytest.mark.parametrize("name", ["llama", "bert_classifier", "vit", "perceptron", "t5"])
def test_frozen_parts(name: str, part: str) -> None:
    student = KINDS[name].model(0, 2)
    parameters = dict(student.named_parameters())
    keys = list(parameters)
    frozen = {
        "first": keys[: len(keys) // 2],
        "last": keys[len(keys) // 2 :],
        "embeddings": [key for key in keys if "emb" in key or "shared" in key] or keys[:1],
    }[part]
    for key in frozen:
        parameters[key].requires_grad_(False)
    start = copy.deepcopy(student.state_dict())
    built = distiller(name, student)
    trained(built)
    optimized = {id(p) for group in built.optimizer.param_groups for p in group["params"]}
    moved = 0
    for key, parameter in student.named_parameters():
        same = torch.equal(parameter, start[key])
        assert (id(parameter) in optimized) == (key not in frozen)
        if key in frozen:
            assert same, key
            assert not parameter.requires_grad
        else:
            moved += not same
    assert moved > 0


# ---- LoRA -----------------------------------------------------------------------------------------------------

LORA = {
    "llama": {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"},
    "gpt2": {"target_modules": ["c_attn"], "task_type": "CAUSAL_LM", "fan_in_fan_out": True},
    "bert_mlm": {"target_modules": ["query", "value"]},
    "bert_classifier": {"target_modules": ["query"], "task_type": "SEQ_CLS"},
    "t5": {"target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"},
    "vit": {"target_modules": ["query", "q_proj", "value"]},
    "perceptron": {"target_modules": ["layers.0"]},
}


def adapted(name: str, **config: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = {**LORA[name], **config}
    with seeded(3):
        return peft.get_peft_model(KINDS[name].model(0, 1), peft.LoraConfig(r=4, lora_alpha=8, **settings))


def logits(model: Any, name: str) -> torch.Tensor:
    batch = Collator(name)(KINDS[name].data(5, 4))
    batch.pop("labels")
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    with torch.no_grad():
        returned = model.eval()(**batch)
    return returned if isinstance(returned, torch.Tensor) else returned.logits


@pytest.mark.parametrize("name", LORA)
def test_lora(name: str, tmp_path: Path) -> None:
    """Trains the adapter alone, with the plain student's first loss; saves the adapter alone, which loads again."""
    import peft

    student = adapted(name)
    base = {key: value.clone() for key, value in student.state_dict().items()}
    before = logits(student, name)
    built = distiller(name, student, Padding("right", 3, 9), learning_rate=0.05, save_strategy="steps", save_steps=3)
    built.args.output_dir = str(tmp_path)
    history = trained(built)
    plain = trained(distiller(name, KINDS[name].model(0, 1), Padding("right", 3, 9)))
    assert losses(history)[0] == pytest.approx(losses(plain)[0], rel=1e-5)
    for key, value in student.state_dict().items():
        if "lora_" not in key and "modules_to_save" not in key:
            assert torch.equal(value, base[key]), key
    after = logits(student, name)
    assert not torch.equal(after, before)
    built.save_model(str(tmp_path / "final"))
    for directory in (tmp_path / "checkpoint-3", tmp_path / "final"):
        saved = load_file(directory / "adapter_model.safetensors")
        assert all("lora_" in key or "classifier" in key for key in saved)
        assert not (directory / "model.safetensors").exists()
        again = peft.PeftModel.from_pretrained(KINDS[name].model(0, 1), directory)
        torch.testing.assert_close(logits(again, name), after)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert_mlm", "t5"])
def test_lora_sees_the_same_positions(name: str) -> None:
    """What counts is read off the model inside the adapter: padding and cutting change nothing."""
    student = adapted(name)
    inner = copy.deepcopy(student.get_base_model()).double().eval()
    teacher = KINDS[name].model(5, 2).double().eval()
    soft, hard = batch_losses(KINDS[name], inner, teacher, KINDS[name].data(11, 2), kl)
    metrics = distiller(name, student, Padding("right", 4, 9)).evaluate()
    assert metrics["eval_loss/soft"] == pytest.approx(soft.item(), rel=1e-5)
    assert metrics["eval_loss/hard"] == pytest.approx(hard.item(), rel=1e-5)


def test_lora_on_the_output_head(tmp_path: Path) -> None:
    import peft

    student = adapted("llama", target_modules=["lm_head"])
    before = logits(student, "llama")
    built = distiller("llama", student, learning_rate=0.05)
    trained(built)
    built.save_model(str(tmp_path))
    after = logits(student, "llama")
    assert not torch.equal(after, before)
    again = peft.PeftModel.from_pretrained(KINDS["llama"].model(0, 1), tmp_path)
    torch.testing.assert_close(logits(again, "llama"), after)


def test_lora_with_gradient_checkpointing() -> None:
    plain = trained(distiller("llama", adapted("llama")))
    checkpointed = trained(
        distiller(
            "llama",
            adapted("llama"),
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    )
    assert losses(checkpointed, "grad_norm")[0] > 0
    assert losses(checkpointed) == pytest.approx(losses(plain), rel=1e-6)


# ---- models of one's own ---------------------------------------------------------------------------------------


class TokenModel(nn.Module):
    """Neither a configuration nor a loss; it knows nothing of labels."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.embed(input_ids))}


@pytest.mark.parametrize("padding", [Padding(), Padding("right", 5, 7), Padding("left", 2, 9)], ids=str)
def test_plain_module_with_a_position_for_every_token(padding: Padding) -> None:
    collate = Collator("bert_mlm", padding)

    def collator(samples: list[Any]) -> dict[str, torch.Tensor]:
        batch = collate(samples)
        return {key: batch[key] for key in ("input_ids", "labels")}

    built = distiller("bert_mlm", TokenModel(0), teacher=TokenModel(5), data_collator=collator)
    student, teacher = TokenModel(0).double(), TokenModel(5).double()

    def rows(model: Any, sample: Any) -> Any:
        counted = sample["labels"] != -100
        return model(sample["input_ids"][None])["logits"][0][counted], sample["labels"][counted]

    kind = dataclasses.replace(KINDS["bert_mlm"], rows=rows)
    soft, hard = batch_losses(kind, student, teacher, KINDS["bert_mlm"].data(11, 2), kl)
    metrics = built.evaluate()
    assert metrics["eval_loss/soft"] == pytest.approx(soft.item(), rel=1e-5)
    assert metrics["eval_loss/hard"] == pytest.approx(hard.item(), rel=1e-5)
    trained(built)


def test_a_task_loss_needs_labels() -> None:
    built = distiller("llama", llama(0, 1))
    built.train_dataset = [{k: v for k, v in sample.items() if k != "labels"} for sample in built.train_dataset]
    with pytest.raises(ConfigError, match="labels") as refused:
        trained(built)
    assert refused.value.key == "alpha"


def test_labels_that_are_no_classes_need_a_loss() -> None:
    built = distiller("perceptron", KINDS["perceptron"].model(0, 1))
    built.train_dataset = [{**sample, "labels": torch.randn(4)} for sample in built.train_dataset]
    with pytest.raises(ConfigError, match="compute_loss_func") as refused:
        trained(built)
    assert refused.value.key == "alpha"


def test_compute_loss_func() -> None:
    """A user's task loss, as Trainer takes it, is given what counts in the batch."""
    seen: list[int] = []

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        seen.append(int(num_items_in_batch))
        values = nn.functional.cross_entropy(outputs.logits, labels, ignore_index=-100, reduction="sum")
        return values / num_items_in_batch

    own = trained(distiller("bert_classifier", KINDS["bert_classifier"].model(0, 1), compute_loss_func=loss))
    builtin = trained(distiller("bert_classifier", KINDS["bert_classifier"].model(0, 1)))
    assert losses(own) == pytest.approx(losses(builtin), rel=1e-5)
    assert losses(own, "loss/hard") == pytest.approx(losses(builtin, "loss/hard"), rel=1e-5)
    counted = sum(int(sample["labels"] != -100) for sample in KINDS["bert_classifier"].data(24, 1))
    assert sum(seen) == counted


def test_label_smoothing() -> None:
    """Trainer's option goes into the task loss, averaged over what counts; with padding or without."""
    student = llama(0, 1)
    plain = distiller("llama", copy.deepcopy(student), label_smoothing_factor=0.2).evaluate()
    padded = distiller("llama", copy.deepcopy(student), Padding("right", 5, 7), label_smoothing_factor=0.2).evaluate()
    without = distiller("llama", copy.deepcopy(student)).evaluate()
    assert padded["eval_loss/hard"] == pytest.approx(plain["eval_loss/hard"], rel=1e-5)
    assert plain["eval_loss/hard"] != pytest.approx(without["eval_loss/hard"], rel=1e-4)
    assert plain["eval_loss/soft"] == pytest.approx(without["eval_loss/soft"], rel=1e-6)


def test_reload_of_a_trained_student(tmp_path: Path) -> None:
    student = llama(0, 1)
    built = distiller("llama", student)
    trained(built)
    built.save_model(str(tmp_path))
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path), "llama"), logits(student, "llama"))
