"""A student made from the teacher's configuration and, where asked, its weights."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.reconfig import reconfig_model
from tests.support import bert_classifier, bert_mlm, gpt2, llama, seeded, t5, vit

KINDS: dict[str, Any] = {
    "llama": (llama, {"num_hidden_layers": 2}, "model.layers"),
    "gpt2": (gpt2, {"n_layer": 2}, "transformer.h"),
    "bert": (bert_classifier, {"num_hidden_layers": 2}, "bert.encoder.layer"),
    "bert_mlm": (bert_mlm, {"num_hidden_layers": 2}, "bert.encoder.layer"),
    "vit": (vit, {"num_hidden_layers": 2}, "vit.layers"),
    "t5": (t5, {"num_layers": 2, "num_decoder_layers": 2}, "decoder.block"),
}


def teacher(kind: str) -> Any:
    """Weights far from their initialisation, so that a copy is never confused with it."""
    model = KINDS[kind][0](seed=1, layers=4)
    with seeded(2), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def inputs(kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if kind == "vit":
        return {"pixel_values": torch.randn(2, 1, 8, 8, generator=generator)}
    ids = torch.randint(1, 64, (2, 9), generator=generator)
    return {"input_ids": ids, "decoder_input_ids": ids.flip(1)} if kind == "t5" else {"input_ids": ids}


@torch.no_grad()
def logits(model: Any, kind: str) -> torch.Tensor:
    return model.eval()(**inputs(kind)).logits


def pointers(model: nn.Module) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def groups(model: nn.Module) -> set[frozenset[str]]:
    """Which names are one tensor."""
    found: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), set()).add(name)
    return {frozenset(names) for names in found.values() if len(names) > 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_everything(kind: str, tmp_path: Path) -> None:
    model = teacher(kind)
    before, config = state(model), model.config.to_dict()
    copied = reconfig_model(model, "copied", copy_matching_weights=True)
    assert copied.training
    assert torch.equal(logits(copied, kind), logits(model, kind))
    assert not pointers(copied) & pointers(model)
    assert groups(copied) == groups(model)
    assert copied.config is not model.config
    assert copied.config.name_or_path == "copied"
    assert model.config.to_dict() == config
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    copied = reconfig_model(model, "copied", copy_matching_weights=True)
    copied.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), kind), logits(model, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_layers(kind: str) -> None:
    """The first layers by default, as in silverspoon-kd."""
    model, (_, diff, stack) = teacher(kind), KINDS[kind]
    kept = {**state(model)}
    student = reconfig_model(model, "student", diff, copy_matching_weights=True, freeze_copied_weights=True)
    assert len(student.get_submodule(stack)) == 2
    for key in diff:
        assert getattr(student.config, key) == 2
    assert all(torch.equal(value, kept[name]) for name, value in student.state_dict().items())
    assert not any(parameter.requires_grad for parameter in student.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_layers(kind: str) -> None:
    model, (_, diff, stack) = teacher(kind), KINDS[kind]
    student = reconfig_model(model, "student", diff, copy_matching_weights=True, copy_layers=[1, 3])
    for new, old in ((0, 1), (1, 3)):
        source = model.get_submodule(stack)[old].state_dict()
        for name, value in student.get_submodule(stack)[new].state_dict().items():
            if "relative_attention_bias" not in name:
                assert torch.equal(value, source[name]), name
    biases = {name: value for name, value in student.state_dict().items() if "relative_attention_bias" in name}
    assert len(biases) == (2 if kind == "t5" else 0)
    for name, value in biases.items():
        assert torch.equal(value, model.state_dict()[name]), "kept in the first layer, where alone it is stored"


def test_layers_that_do_nothing_can_be_left_out() -> None:
    model = teacher("llama")
    with torch.no_grad():
        for layer in (0, 2):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    student = reconfig_model(model, "s", {"num_hidden_layers": 2}, True, copy_layers=[1, 3])
    torch.testing.assert_close(logits(student, "llama"), logits(model, "llama"), rtol=1e-6, atol=1e-6)


def test_only_the_side_that_changes_takes_chosen_layers() -> None:
    model = t5(layers=2)
    model = reconfig_model(model, "x", {"num_layers": 2, "num_decoder_layers": 4})
    student = reconfig_model(model, "y", {"num_decoder_layers": 2}, True, copy_layers=[3, 1])
    for name, value in student.state_dict().items():
        name = {"decoder.block.0": "decoder.block.3"}.get(name[:15], name[:15]) + name[15:]
        if "relative" not in name:
            assert torch.equal(value, model.state_dict()[name]), name


def test_freezes_exactly_what_was_copied() -> None:
    model = teacher("llama")
    student = reconfig_model(
        model, "s", {"intermediate_size": 20, "num_hidden_layers": 6}, True, freeze_copied_weights=True
    )
    for name, parameter in student.named_parameters():
        new = "mlp" in name or ".4." in name or ".5." in name
        assert parameter.requires_grad == new, name
        if not new:
            assert torch.equal(parameter, model.state_dict()[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_kept(kind: str, dtype: torch.dtype) -> None:
    model = teacher(kind).to(dtype)
    student = reconfig_model(model, "s", copy_matching_weights=True)
    for ours, theirs in zip(student.parameters(), model.parameters(), strict=True):
        assert ours.dtype == theirs.dtype == dtype


def test_mixed_dtypes_are_kept() -> None:
    model = teacher("llama").to(torch.bfloat16)
    model.model.norm.float()
    student = reconfig_model(model, "s", {"num_hidden_layers": 2})
    assert student.model.norm.weight.dtype == torch.float32
    assert student.lm_head.weight.dtype == torch.bfloat16


def test_buffers_belong_to_the_new_configuration() -> None:
    model = teacher("llama")
    student = reconfig_model(
        model, "s", {"head_dim": 8, "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}}
    )
    expected = 5e4 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(student.model.rotary_emb.inv_freq, expected)


def test_generation_config_and_attention_are_kept() -> None:
    model = teacher("llama")
    model.generation_config = GenerationConfig(max_length=77)
    model.set_attn_implementation("eager")
    student = reconfig_model(model, "s", {"num_hidden_layers": 2})
    assert student.generation_config.max_length == 77
    assert student.generation_config is not model.generation_config
    assert student.config._attn_implementation == "eager"


def test_lists_with_an_entry_per_layer_follow() -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
    config = Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=4, max_window_layers=2, layer_types=kinds,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    shorter = reconfig_model(model, "s", {"num_hidden_layers": 3})
    assert shorter.config.layer_types == kinds[:3]
    chosen = reconfig_model(model, "s", {"num_hidden_layers": 2}, True, copy_layers=[0, 3])
    assert chosen.config.layer_types == ["full_attention", "sliding_attention"]
    longer = reconfig_model(model, "s", {"num_hidden_layers": 5}, True)
    assert longer.config.layer_types == [*kinds, "sliding_attention"]
    given = reconfig_model(model, "s", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]})
    assert given.config.layer_types == ["sliding_attention"]
    assert model.config.layer_types == kinds


def test_nested_configurations() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": 64, "max_position_embeddings": 16},
        vision_config={**small, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    model = transformers.CLIPModel(config)
    for diff in (
        {"text_config.num_hidden_layers": 1, "vision_config.intermediate_size": 24},
        {"text_config": {"num_hidden_layers": 1}, "vision_config": {"intermediate_size": 24}},
    ):
        student = reconfig_model(model, "s", diff, copy_matching_weights=True)
        assert len(student.text_model.encoder.layers) == 1
        assert student.vision_model.encoder.layers[1].mlp.fc1.out_features == 24
        assert model.config.text_config.num_hidden_layers == 2
    with pytest.raises(ConfigError, match="near are num_hidden_layers") as refused:
        reconfig_model(model, "s", {"text_config.num_hiden_layers": 1})
    assert refused.value.key == "diff.text_config.num_hiden_layers"


def test_number_of_labels() -> None:
    student = reconfig_model(teacher("bert"), "s", {"num_labels": 7}, True, True)
    assert student.classifier.out_features == 7
    assert {name for name, p in student.named_parameters() if p.requires_grad} == {
        "classifier.weight",
        "classifier.bias",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_silverspoon_kd(kind: str) -> None:
    """The same fresh weights from the same seed, and the same copies."""
    kd = pytest.importorskip("silverspoon_kd")
    model, diff = teacher(kind), KINDS[kind][1]
    for keywords in (
        {},
        {"copy_matching_weights": True},
        {"copy_matching_weights": True, "freeze_copied_weights": True},
    ):
        results = []
        for function in (reconfig_model, kd.reconfig_model):
            with seeded(5), contextlib.redirect_stdout(io.StringIO()):
                results.append(function(model, "student", diff, **keywords))
        ours, theirs = results
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())
        assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in theirs.parameters()]
        assert ours.config.name_or_path == theirs.config.name_or_path
        assert ours.training == theirs.training


@pytest.mark.parametrize(
    ("arguments", "key", "message"),
    [
        ({"diff": {"num_layer": 2}}, "diff.num_layer", "num_hidden_layers"),
        ({"diff": {"save_pretrained": 2}}, "diff.save_pretrained", "no such key"),
        ({"diff": {3: 2}}, "diff.3", "no such key"),
        ({"diff": [3]}, "diff", "a mapping"),
        ({"diff": {"hidden_act": "nonsense"}}, "diff", "LlamaForCausalLM"),
        ({"diff": {"num_attention_heads": 0}}, "diff", "LlamaForCausalLM"),
        ({"diff": {"hidden_size": "wide"}}, "diff.hidden_size", "a value for it"),
        ({"freeze_copied_weights": True}, "freeze_copied_weights", "copy_matching_weights"),
        ({"copy_layers": [0]}, "copy_layers", "copy_matching_weights"),
        ({"copy_matching_weights": True, "copy_layers": [0]}, "copy_layers", r"model\.layers has 4"),
        (
            {"diff": {"num_hidden_layers": 1}, "copy_matching_weights": True, "copy_layers": [4]},
            "copy_layers",
            "0 to 3",
        ),
        ({"diff": {"num_hidden_layers": 1}, "copy_matching_weights": True, "copy_layers": [-1]}, "copy_layers", "0 to"),
        ({"diff": {"num_hidden_layers": 1}, "copy_matching_weights": True, "copy_layers": "0"}, "copy_layers", "list"),
        ({"name_or_path": 3}, "name_or_path", "a name or path"),
        ({"model": nn.Linear(2, 2)}, "model", "transformers model"),
    ],
)
def test_refused(arguments: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        reconfig_model(**{"model": teacher("llama"), "name_or_path": "s", **arguments})
    assert refused.value.key == key
