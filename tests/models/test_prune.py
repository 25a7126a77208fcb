"""Students cut out of teachers: what counts for nothing can go without a trace, and what is left is a proper model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaForMaskedLM,
)
from transformers.pytorch_utils import Conv1D

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.prune import prune_model
from tests.support import bert_classifier, bert_mlm, gpt2, llama, seeded, t5, vit

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 64, "max_position_embeddings": 64}
BERT_PARTS = ("attention.self", "query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense")
VIT_PARTS = ("attention", "q_proj", "k_proj", "v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2")
LLAMA_PARTS = ("self_attn", "q_proj", "k_proj", "v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
GPT2_PARTS = ("attn", "c_attn", "", "", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")

# model, list of layers, parts of a layer, keys of the configuration: heads, units, width, layers
KINDS: dict[str, tuple[Callable[[], Any], str, tuple[str, ...], tuple[str, str, str, str]]] = {}
NAMES = ("num_attention_heads", "intermediate_size", "hidden_size", "num_hidden_layers")
KINDS["llama"] = (lambda: llama(layers=2, num_key_value_heads=4), "model.layers", LLAMA_PARTS, NAMES)
KINDS["llama_gqa"] = (lambda: llama(layers=2), "model.layers", LLAMA_PARTS, NAMES)
KINDS["llama_tied"] = (lambda: llama(layers=2, tie_word_embeddings=True), "model.layers", LLAMA_PARTS, NAMES)
KINDS["qwen2"] = (
    lambda: Qwen2ForCausalLM(Qwen2Config(**TEXT, num_key_value_heads=2)), "model.layers", LLAMA_PARTS, NAMES,
)  # fmt: skip
KINDS["qwen3"] = (
    lambda: Qwen3ForCausalLM(Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8)),
    "model.layers",
    LLAMA_PARTS,
    NAMES,
)
KINDS["gpt2"] = (lambda: gpt2(layers=2), "transformer.h", GPT2_PARTS, ("n_head", "n_inner", "n_embd", "n_layer"))
KINDS["bert"] = (lambda: bert_classifier(layers=2), "bert.encoder.layer", BERT_PARTS, NAMES)
KINDS["bert_mlm"] = (lambda: bert_mlm(layers=2), "bert.encoder.layer", BERT_PARTS, NAMES)
KINDS["roberta"] = (lambda: RobertaForMaskedLM(RobertaConfig(**TEXT)), "roberta.encoder.layer", BERT_PARTS, NAMES)
KINDS["vit"] = (lambda: vit(layers=2), "vit.layers", VIT_PARTS, NAMES)
KINDS["deit"] = (
    lambda: DeiTForImageClassification(DeiTConfig(**SMALL, image_size=8, patch_size=4, num_channels=1)),
    "deit.layers",
    VIT_PARTS,
    NAMES,
)
ROTARY = ("llama", "llama_gqa", "llama_tied", "qwen2", "qwen3")


def teacher(kind: str) -> Any:
    """No weight is zero, no gain is one, and no two heads or units are alike."""
    with seeded(1):
        model = KINDS[kind][0]()
    with seeded(2), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


def inputs(kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if kind in ("vit", "deit", "resnet"):
        return {"pixel_values": torch.randn(2, 1, 8, 8, generator=generator)}
    return {"input_ids": torch.randint(2, 64, (2, 9), generator=generator)}


@torch.no_grad()
def logits(model: Any, kind: str) -> torch.Tensor:
    return model.eval()(**inputs(kind)).logits


def layers(model: Any, kind: str) -> Any:
    return model.get_submodule(KINDS[kind][1])


def weight(module: Any) -> torch.Tensor:
    """``[out, in]``, whoever stores it."""
    return module.weight.data.T if isinstance(module, Conv1D) else module.weight.data


def clear(module: Any, rows: Any = (), columns: Any = ()) -> None:
    weight(module)[list(rows)] = 0
    weight(module)[:, list(columns)] = 0
    if module.bias is not None:
        module.bias.data[list(rows)] = 0


def shape(model: Any, kind: str) -> tuple[int, int, int]:
    """Heads, key-value heads and width of a head."""
    attention = layers(model, kind)[0].get_submodule(KINDS[kind][2][0])
    width = getattr(attention, "head_dim", None) or attention.attention_head_size
    heads = model.config.num_attention_heads
    return heads, getattr(model.config, "num_key_value_heads", None) or heads, width


def clear_head_rows(model: Any, kind: str, layer: Any, query_rows: list[int], key_rows: list[int]) -> None:
    attention, query, key, value, output = KINDS[kind][2][:5]
    block = layer.get_submodule(attention)
    if query == "c_attn":
        width = model.config.hidden_size
        joined = [*query_rows, *(width + row for row in key_rows), *(2 * width + row for row in key_rows)]
        clear(block.get_submodule(query), joined)
    else:
        clear(block.get_submodule(query), query_rows)
        for name in (key, value):
            clear(block.get_submodule(name), key_rows)
    clear(layer.get_submodule(output), (), query_rows)


def clear_heads(model: Any, kind: str, dead: list[list[int]], key_value_too: bool) -> None:
    """Zero everything of these heads, a list per layer."""
    heads, groups, width = shape(model, kind)
    for layer, numbers in zip(layers(model, kind), dead, strict=True):
        rows = [head * width + i for head in numbers for i in range(width)]
        each = heads // groups
        dead_groups = [g for g in range(groups) if key_value_too and all(g * each + i in numbers for i in range(each))]
        clear_head_rows(model, kind, layer, rows, [g * width + i for g in dead_groups for i in range(width)])


def pruned(model: Any, diff: dict[str, Any], **keywords: Any) -> Any:
    """Prune, and check what must hold whatever is pruned."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config, trained = model.config.to_dict(), [p.requires_grad for p in model.parameters()]
    student = prune_model(model, "pruned", diff, **keywords)
    assert type(student) is type(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.config.to_dict() == config
    assert [p.requires_grad for p in model.parameters()] == trained
    theirs = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not theirs & {t.untyped_storage().data_ptr() for t in (*student.parameters(), *student.buffers())}
    for key, value in diff.items():
        assert getattr(student.config, key) == value
    assert student.config.name_or_path == "pruned"
    assert not student.training
    return student


def check_round_trip(student: Any, kind: str, folder: Path) -> None:
    student.save_pretrained(folder)
    assert torch.equal(logits(type(student).from_pretrained(folder), kind), logits(student, kind))


# ---- what counts for nothing can go ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_dead_heads(kind: str, tmp_path: Path) -> None:
    """In every layer other heads, as many as leave half; at the same width."""
    model = teacher(kind)
    heads, groups, width = shape(model, kind)
    each = heads // groups
    if each == 1:  # every head has its own keys and values: the dead ones take theirs with them
        dead = [[h for h in range(heads) if h % 2 == layer % 2] for layer in range(2)]
        diff = {KINDS[kind][3][0]: heads // 2}
        diff |= {"num_key_value_heads": groups // 2} if hasattr(model.config, "num_key_value_heads") else {}
    else:
        dead = [[g * each + (g + layer) % each for g in range(groups)] for layer in range(2)]
        diff = {"num_attention_heads": heads // 2}
    clear_heads(model, kind, dead, key_value_too=each == 1)
    student = pruned(model, diff)
    torch.testing.assert_close(logits(student, kind), logits(model, kind), rtol=1e-5, atol=1e-5)
    if kind in ROTARY or kind in ("vit", "deit"):
        assert shape(student, kind)[2] == width
        assert sum(p.numel() for p in student.parameters()) < sum(p.numel() for p in model.parameters())
    check_round_trip(student, kind, tmp_path)


@pytest.mark.parametrize("kind", ["llama_gqa", "qwen2", "qwen3"])
def test_dead_groups(kind: str, tmp_path: Path) -> None:
    """A key-value head that goes takes all its query heads with it."""
    model = teacher(kind)
    clear_heads(model, kind, [[2, 3], [0, 1]], key_value_too=True)
    student = pruned(model, {"num_attention_heads": 2, "num_key_value_heads": 1})
    torch.testing.assert_close(logits(student, kind), logits(model, kind), rtol=1e-5, atol=1e-5)
    check_round_trip(student, kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_dead_units(kind: str, tmp_path: Path) -> None:
    model = teacher(kind)
    up, down = KINDS[kind][2][5:]
    ups = (up, "mlp.up_proj") if kind in ROTARY else (up,)
    size = weight(layers(model, kind)[0].get_submodule(down)).shape[1]
    for index, layer in enumerate(layers(model, kind)):
        dead = torch.randperm(size, generator=torch.Generator().manual_seed(index))[: size - 20].tolist()
        for name in ups:
            clear(layer.get_submodule(name), dead)
        clear(layer.get_submodule(down), (), dead)
    student = pruned(model, {KINDS[kind][3][1]: 20})
    torch.testing.assert_close(logits(student, kind), logits(model, kind), rtol=1e-5, atol=1e-5)
    check_round_trip(student, kind, tmp_path)


def mirror(tensor: torch.Tensor, axis: int, sign: float = -1.0) -> None:
    """Of 16 hidden units make 8 that are always zero and 8 that sum to zero, in pairs."""
    alive, dead = torch.tensor([1, 2, 5, 6, 9, 10, 11, 12]), torch.tensor([0, 3, 4, 7, 8, 13, 14, 15])
    tensor.index_copy_(axis, alive[4:], sign * tensor.index_select(axis, alive[:4]))
    tensor.index_fill_(axis, dead, 0.0)


def mirror_hidden(model: Any, kind: str) -> None:
    """Half of the hidden units are zero in everything, and the mean over the others is zero wherever a norm looks."""
    attention, *projections, output, up, down = KINDS[kind][2]
    done = set()
    for layer in layers(model, kind):
        reading = [f"{attention}.{name}" for name in projections if name] + [up]
        for name in [*reading, *(["mlp.up_proj"] if kind in ROTARY else [])]:
            mirror(weight(layer.get_submodule(name)), 1)
            done |= set(layer.get_submodule(name).parameters())
        for name in (output, down):
            module = layer.get_submodule(name)
            mirror(weight(module), 0)
            if module.bias is not None:
                mirror(module.bias.data, 0)
            done |= set(module.parameters())
    for module in model.modules():
        if isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm"):
            if len(module.weight) == 16:
                mirror(module.weight.data, 0, sign=1.0)
            done.add(module.weight)
    for parameter in model.parameters():
        for axis, size in enumerate(parameter.shape):
            if size == 16 and parameter not in done:
                mirror(parameter.data, axis)


def without_epsilon(model: Any) -> Any:
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"):
        if hasattr(model.config, name):
            setattr(model.config, name, 1e-14)
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-14)
    return model


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("bert_mlm", "roberta")])
def test_dead_width(kind: str, tmp_path: Path) -> None:
    """Exact where the norms' statistics allow it: no epsilon, and for LayerNorm a mean of zero.

    Where heads get narrower with the model, half of each head's dimensions are dead too, others in every layer. (The
    heads of bert_mlm and roberta have a norm behind a GELU, whose mean is never zero.)
    """
    model = without_epsilon(teacher(kind))
    heads, groups, width = shape(model, kind)
    mirror_hidden(model, kind)
    narrower = kind not in ROTARY
    for index, layer in enumerate(layers(model, kind)) if narrower else ():
        dead = range(index, width, 2)
        rows = [head * width + i for head in range(heads) for i in dead]
        clear_head_rows(model, kind, layer, rows, rows)
    diff = {KINDS[kind][3][2]: 8} | ({"n_inner": 64} if kind == "gpt2" else {})  # else GPT-2 has 4 units per width
    student = pruned(model, diff)
    assert shape(student, kind) == (heads, groups, width // 2 if narrower else width)
    torch.testing.assert_close(logits(student, kind), logits(model, kind), rtol=1e-3, atol=1e-4)
    check_round_trip(student, kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_at_once(kind: str, tmp_path: Path) -> None:
    """Real pruning, from which no exact result is expected: a proper model that keeps the signal's scale and learns."""
    model = teacher(kind)
    heads, units, width, depth = KINDS[kind][3]
    counts = shape(model, kind)
    diff = {heads: counts[0] // 2, units: 24, width: 8, depth: 1}
    if "num_key_value_heads" in model.config.to_dict():
        diff["num_key_value_heads"] = counts[1] // 2
    student = pruned(model, diff)
    assert len(layers(student, kind)) == 1
    assert shape(student, kind)[:2] == (counts[0] // 2, counts[1] // 2)
    check_round_trip(student, kind, tmp_path)
    full, cut = logits(model, kind), logits(student, kind)
    assert full.shape == cut.shape
    assert 0.2 < (cut.std() / full.std()).item() < 3
    output = student.train()(**inputs(kind))
    output.logits.square().sum().backward()
    missing = {name for name, p in student.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()}
    assert not missing


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_prune(kind: str) -> None:
    model = teacher(kind)
    student = pruned(model, {}, freeze_copied_weights=True)
    assert torch.equal(logits(student, kind), logits(model, kind))
    assert not any(p.requires_grad for p in student.parameters())


# ---- what is chosen, kept and refused ----------------------------------------------------------------------


def test_the_strongest_units_stay_in_their_order() -> None:
    model = teacher("llama")
    student = pruned(model, {"intermediate_size": 10})
    for old, new in zip(layers(model, "llama"), layers(student, "llama"), strict=True):
        norms = old.mlp.gate_proj.weight.square().sum(1) + old.mlp.up_proj.weight.square().sum(1)
        norms += old.mlp.down_proj.weight.square().sum(0)
        kept = sorted(norms.topk(10).indices.tolist())
        assert torch.equal(new.mlp.gate_proj.weight, old.mlp.gate_proj.weight[kept])
        assert torch.equal(new.mlp.down_proj.weight, old.mlp.down_proj.weight[:, kept])


def test_heads_that_get_wider_start_without_effect_and_learn() -> None:
    """BERT's heads are as wide as width over number, so that one head fewer is a wider head."""
    model = teacher("bert")
    student = pruned(model, {"num_attention_heads": 1})
    attention = layers(student, "bert")[0].attention
    assert attention.self.attention_head_size == 16
    assert not attention.self.key.weight[8:].any()
    assert not attention.output.dense.weight[:, 8:].any()
    assert attention.self.query.weight[8:].any()
    student(**inputs("bert")).logits.sum().backward()
    assert attention.self.key.weight.grad[8:].any()
    assert attention.output.dense.weight.grad[:, 8:].any()


def test_freezes_what_was_not_pruned() -> None:
    """As silverspoon-kd does: parameters that were taken over whole."""
    model = teacher("llama")
    student = pruned(model, {"intermediate_size": 10}, freeze_copied_weights=True)
    assert {name for name, p in student.named_parameters() if p.requires_grad} == {
        f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(2) for part in ("gate", "up", "down")
    }
    assert all(p.requires_grad for p in pruned(model, {"intermediate_size": 10}).parameters())


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2", "bert_mlm"])
def test_tied_embeddings_stay_tied(kind: str) -> None:
    student = pruned(teacher(kind), {KINDS[kind][3][2]: 8})
    assert student.get_output_embeddings().weight is student.get_input_embeddings().weight


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_dtype_is_kept(kind: str) -> None:
    student = pruned(teacher(kind).to(torch.bfloat16), {KINDS[kind][3][2]: 8, KINDS[kind][3][3]: 1})
    assert {p.dtype for p in student.parameters()} == {torch.bfloat16}


def test_pruned_twice() -> None:
    model = teacher("vit")
    once = pruned(model, {"num_attention_heads": 1})
    assert once.config.head_dim == 8
    twice = pruned(once, {"hidden_size": 8})
    assert layers(twice, "vit")[0].attention.q_proj.weight.shape == (8, 8)


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_same_shapes_as_silverspoon_kd(kind: str) -> None:
    kd = pytest.importorskip("silverspoon_kd")
    pytest.importorskip("torch_pruning")
    model = teacher(kind)
    theirs = kd.prune_model(model, "x", {"intermediate_size": 16}, inputs(kind))
    ours = prune_model(model, "x", {"intermediate_size": 16}, inputs(kind))
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert ours.config.name_or_path == theirs.config.name_or_path
    assert ours.training == theirs.training


@pytest.mark.parametrize(
    ("kind", "diff", "message"),
    [
        ("llama", {"intermediate_size": 64}, "32 intermediate units or fewer"),
        ("llama", {"hidden_size": 32}, "hidden size of 16 or less"),
        ("llama", {"num_hidden_layers": 3}, "model.layers.2.* would be new"),
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8}, "no more than 4 key-value heads"),
        ("llama_gqa", {"num_key_value_heads": 1}, "2 key-value heads with 2 query heads each"),
        ("llama", {"head_dim": 2}, "rotary"),
        ("llama", {"vocab_size": 32}, "embed_tokens"),
        ("bert", {"num_labels": 2}, "classifier"),
        ("bert", {"max_position_embeddings": 16}, "position_embeddings"),
        ("bert", {"num_attention_heads": 3}, "BertForSequenceClassification"),
        ("gpt2", {"n_positions": 16}, "wpe"),
        ("vit", {"intermediat_size": 16}, "near are intermediate_size"),
    ],
)
def test_refused_sizes(kind: str, diff: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        prune_model(teacher(kind), "x", diff)
    assert refused.value.key.startswith("diff")


def test_ignored_layers_and_rounding() -> None:
    model = teacher("llama")
    with pytest.raises(ConfigError, match="keeps its size") as refused:
        prune_model(model, "x", {"intermediate_size": 16}, ignored_layers=[model.model.layers[1].mlp])
    assert refused.value.value == "model.layers.1.mlp"
    pruned(model, {"intermediate_size": 16}, ignored_layers=[model.model.layers[1].self_attn, model.lm_head])
    with pytest.raises(ConfigError, match="modules of the model"):
        prune_model(model, "x", {"intermediate_size": 16}, ignored_layers=[nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="a divisor of the new sizes"):
        prune_model(model, "x", {"intermediate_size": 20}, round_to=8)
    pruned(model, {"intermediate_size": 24, "num_hidden_layers": 1}, round_to=8)


# ---- models that are traced --------------------------------------------------------------------------------


def resnet() -> Any:
    config = ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5
    )
    with seeded(4):
        model = ResNetForImageClassification(config)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    tensor.add_(torch.rand_like(tensor) * (0.1 if "running" in name else 0.5))
    return model.eval()


def test_traced(tmp_path: Path) -> None:
    """Channels of a ResNet that are zero can go."""
    pytest.importorskip("torch_pruning")
    model = resnet()
    dead = [0, 2, 5, 6, 8, 9, 12, 15]
    for name, module in model.named_modules():
        if ".stages.1." in name and (isinstance(module, nn.BatchNorm2d) or hasattr(module, "kernel_size")):
            for tensor in (module.weight, module.bias, getattr(module, "running_mean", None)):
                if isinstance(tensor, torch.Tensor) and tensor.dim() in (1, 4) and tensor.shape[0] == 16:
                    tensor.data[dead] = 0
    model.classifier[1].weight.data[:, dead] = 0
    student = pruned(model, {"hidden_sizes": [8, 8]}, example_inputs=inputs("resnet"))
    torch.testing.assert_close(logits(student, "resnet"), logits(model, "resnet"), rtol=1e-5, atol=1e-5)
    check_round_trip(student, "resnet", tmp_path)


def test_traced_feed_forward_of_t5() -> None:
    pytest.importorskip("torch_pruning")
    with seeded(1):
        model = t5(layers=2).eval()
    blocks = [module for module in model.modules() if hasattr(module, "wi")]
    for index, block in enumerate(blocks):
        dead = list(range(index, 32, 2)) if index < 2 else list(range(1, 32, 2))
        clear(block.wi, dead)
        clear(block.wo, (), dead)
    ids = {**inputs("t5"), "decoder_input_ids": inputs("t5")["input_ids"].flip(1)}
    student = pruned(model, {"d_ff": 16}, example_inputs=ids)
    torch.testing.assert_close(student(**ids).logits, model(**ids).logits, rtol=1e-5, atol=1e-5)
    frozen = pruned(model, {"d_ff": 16}, example_inputs=ids, freeze_copied_weights=True)
    assert {n.rpartition(".")[0][-2:] for n, p in frozen.named_parameters() if p.requires_grad} == {"wi", "wo"}


def test_only_layers_less_needs_no_tracing() -> None:
    model = t5(layers=3)
    student = pruned(model, {"num_layers": 2, "num_decoder_layers": 1})
    assert (len(student.encoder.block), len(student.decoder.block)) == (2, 1)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in student.state_dict().items())


def test_traced_without_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="t5 has to be traced") as refused:
        prune_model(t5(), "x", {"d_ff": 16})
    assert refused.value.key == "example_inputs"
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(ConfigError, match=r"pip install 'silverspoon-ray\[prune\]'"):
        prune_model(t5(), "x", {"d_ff": 16}, example_inputs=inputs("t5"))
    with pytest.raises(ConfigError, match="smaller sizes"):
        prune_model(t5(), "x", {"d_ff": 64}, example_inputs=inputs("t5"))
    with pytest.raises(ConfigError, match="transformers model"):
        prune_model(nn.Linear(2, 2), "x", {})
