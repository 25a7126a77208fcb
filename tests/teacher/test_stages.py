"""Cutting a model into stages: the same bits as in one piece, each stage with its own weights only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.partial import keep_part, load_part
from silverspoon_ray.models.structure import structure_of
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.pipeline import Handover, PipelineStage, own_tensors
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.stages import balanced, parameter_bytes, plan_pipeline
from tests.support import Pad, bert_mlm, gpt2, llama, ragged_data, seeded, vit

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CPU = torch.device("cpu")


def of(model: str, config: str, **values: Any) -> Callable[[], Any]:
    def make() -> Any:
        with seeded(3):
            return getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **values}))

    return make


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(3, 16, 4),
    "llama_tied": lambda: llama(3, 16, 4, tie_word_embeddings=True),
    "gpt2": lambda: gpt2(3, 16, 4),
    "bert": lambda: bert_mlm(3, 16, 4),
    "vit": lambda: vit(3, 16, 4),
    "qwen2": of("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=2),
    "qwen3": of("Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=2, head_dim=4),
    "gemma3": of("Gemma3ForCausalLM", "Gemma3TextConfig", num_key_value_heads=2, head_dim=4, sliding_window=4),
    "roberta": of("RobertaForMaskedLM", "RobertaConfig"),
    "gpt_neox": of("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "pegasus": of(
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        d_model=16,
        encoder_layers=4,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        decoder_start_token_id=2,
        eos_token_id=2,
        bos_token_id=1,
    ),
    "opt": of("OPTForCausalLM", "OPTConfig", ffn_dim=32, word_embed_proj_dim=16),
    # Their layers return attention weights, which nothing reads.
    "bloom": of("BloomForCausalLM", "BloomConfig", n_layer=4, n_head=4),
    "mpt": of("MptForCausalLM", "MptConfig", d_model=16, n_layers=4, n_heads=4, expansion_ratio=2, max_seq_len=64),
    "gpt_neo": of(
        "GPTNeoForCausalLM", "GPTNeoConfig", num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]]
    ),
}


def batch_for(name: str) -> dict[str, Any]:
    if name == "vit":
        return {"pixel_values": torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))}
    made = Pad("left")(ragged_data(5))
    del made["labels"]
    return {**made, "decoder_input_ids": made["input_ids"][:, -4:]} if name == "pegasus" else made


def through(stages: list[PipelineStage], batch: dict[str, Any], request: TeacherRequest) -> TeacherOutput:
    """What the stages give together."""
    whole, received = TeacherOutput(), None
    for stage in stages:
        received, part = stage.run(dict(batch), request, received, stage is not stages[-1])
        whole.logits = part.logits if part.logits is not None else whole.logits
        whole.outputs |= part.outputs
        whole.inputs |= part.inputs
    return whole


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    pairs = zip(left, right, strict=True)  # what follows the hidden state: attention weights, None or a cache
    return all(same(one, other) for one, other in pairs if isinstance(one, torch.Tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Logits and each layer's input and output, from stages that each read their own weights, for 1, 2 and 3 stages."""
    made = MODELS[name]()
    for buffer in made.buffers():  # a saved one must be read, not made anew
        if buffer.dim() == 2 and buffer.is_floating_point():
            buffer.normal_()
    made.to(dtype).save_pretrained(tmp_path)
    model = type(MODELS[name]()).from_pretrained(tmp_path).eval()  # with what from_pretrained keeps in float32
    assert model.dtype == dtype
    structure = structure_of(model)
    layers = plan_pipeline(structure, 1).layers
    request = TeacherRequest(outputs=layers, inputs=layers)
    expected = LocalTeacher(model).answer(batch_for(name), request)
    if name != "vit":  # of padding there is nothing to compare, but it must be there
        assert not bool(batch_for(name)["attention_mask"].all())
    for number in (1, 2, 3):
        plan = plan_pipeline(structure, number)
        stages, held = [], 0
        for stage in range(number):
            part = load_part(str(tmp_path), own_tensors(structure, plan, stage), CPU)
            held += sum(p.numel() for p in part.parameters() if p.device.type != "meta")
            stages.append(PipelineStage(part, plan, stage))
        for _ in range(2):  # the second time nothing is looked at any more
            answer = through(stages, batch_for(name), request)
            assert torch.equal(answer.logits, expected.logits)
            assert answer.outputs.keys() == answer.inputs.keys() == set(layers)
            assert all(same(answer.outputs[layer], expected.outputs[layer]) for layer in layers)
            assert all(torch.equal(answer.inputs[layer], expected.inputs[layer]) for layer in layers)
        whole = sum(p.numel() for p in model.parameters())
        assert whole <= held <= 1.6 * whole  # a tied head is held twice


def test_only_its_own_tensors_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From a checkpoint in several files, too, and without building the whole model."""
    model = llama(3, 16, 4).eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    plan = plan_pipeline(model, 2)
    with caplog.at_level(logging.WARNING):
        part = load_part(str(tmp_path), own_tensors(model, plan, 1), CPU)
    assert not [r for r in caplog.records if "whole teacher is built" in r.getMessage()]
    there = {name for name, p in part.named_parameters() if p.device.type != "meta"}
    assert there == {n for n, _ in model.named_parameters() if n in own_tensors(model, plan, 1)}
    assert all(torch.equal(part.get_parameter(name), model.get_parameter(name)) for name in there)
    assert all(torch.equal(b, model.get_buffer(name)) for name, b in part.named_buffers())


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, "auto", None])
def test_loading_keywords(dtype: Any, tmp_path: Path) -> None:
    llama(3, 16, 4).to(torch.bfloat16).save_pretrained(tmp_path)
    keywords = {} if dtype is None else {"dtype": dtype}
    whole = transformers.LlamaForCausalLM.from_pretrained(tmp_path, **keywords)
    own = own_tensors(whole, plan_pipeline(whole, 2), 1)
    part = load_part(str(tmp_path), own, CPU, **keywords)
    for name in own - {n for n, _ in whole.named_buffers()}:
        assert torch.equal(part.get_parameter(name), whole.get_parameter(name))
        assert part.get_parameter(name).dtype == whole.get_parameter(name).dtype
    assert all(b.dtype == whole.get_buffer(name).dtype for name, b in part.named_buffers())


def test_names_that_are_translated_fall_back_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = vit(3, 16, 4)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        load_part(str(tmp_path), own_tensors(model, plan_pipeline(model, 2), 0), CPU)
    assert any("another name in the file" in record.getMessage() for record in caplog.records)


class Plain(nn.Module):
    """Layers of different kinds in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(4):
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_a_plain_module() -> None:
    expected = Plain()(torch.ones(3, 6))
    for number in (2, 3):
        stages = []
        for stage in range(number):
            model = Plain().eval()
            plan = plan_pipeline(model, number)
            keep_part(model, own_tensors(model, plan, stage), CPU)
            stages.append(PipelineStage(model, plan, stage))
        assert torch.equal(through(stages, {"x": torch.ones(3, 6)}, TeacherRequest()).logits, expected)


class Skips(nn.Module):
    """Its layers take something from before the layers besides the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.other = nn.Embedding(64, 8), nn.Embedding(64, 8)
        self.layers = nn.ModuleList([Adds() for _ in range(3)])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, other = self.embed(input_ids), self.other(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, other)
        return hidden


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden) + other


class Reuses(Skips):
    """It uses its embedding behind the layers as well."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, torch.zeros(8))
        return hidden + self.other(input_ids)


class Sums(nn.Module):
    """It adds up what all layers give."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(2):
            self.embed, self.layers = nn.Embedding(64, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = total = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
            total = total + hidden
        return total


class Loops(Sums):
    """It runs its layers twice."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in (*self.layers, *self.layers):
            hidden = layer(hidden)
        return hidden


class GivesTwo(nn.Module):
    """A layer that returns something besides the hidden state, and may take it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind

    def forward(self, hidden: torch.Tensor, other: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.linear(hidden)
        hidden = hidden if other is None else hidden + other
        return hidden, hidden.argmax(-1) if self.kind == "whole numbers" else hidden.mean(-1, keepdim=True)


class PassesTwo(nn.Module):
    """What its layers return second is handed on, or added up, or is whole numbers."""

    kind = "handed on"

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, 8), nn.ModuleList(GivesTwo(self.kind) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, other, total = self.embed(input_ids), None, 0.0
        for layer in self.layers:
            hidden, other = layer(hidden, other) if self.kind == "handed on" else layer(hidden)
            total = total + other if self.kind == "added up" else total
        return hidden + total


class AddsUp(PassesTwo):
    kind = "added up"


class Counts(PassesTwo):
    kind = "whole numbers"


REFUSALS = [
    (PassesTwo, "takes `1` from"),
    (AddsUp, "used beside the hidden state"),
    (Counts, "whole numbers besides the hidden state"),
    (Skips, "takes `1` from"),
    (Reuses, "used behind the layers too"),
    (Sums, "used beside the hidden state"),
    (Loops, "runs behind this stage's layers"),
]


@pytest.mark.parametrize(("kind", "said"), REFUSALS)
def test_what_would_be_wrong_is_refused(kind: type[nn.Module], said: str) -> None:
    stages = []
    for stage in range(2):
        model = kind().eval()
        plan = plan_pipeline(model, 2)
        keep_part(model, own_tensors(model, plan, stage), CPU)
        stages.append(PipelineStage(model, plan, stage))
    with pytest.raises(ConfigError, match=said):
        through(stages, {"input_ids": torch.ones(2, 3, dtype=torch.long)}, TeacherRequest())


def test_what_is_not_remembered_is_looked_at_again() -> None:
    """An example shows nothing wrong, and the first real batch takes another way through the model."""

    class Sometimes(Reuses):
        def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            total = hidden = self.embed(input_ids)
            for layer in self.layers:
                hidden = layer(hidden, torch.zeros(8))
            return hidden if mask is None else hidden + total

    model = Sometimes().eval()
    plan = plan_pipeline(model, 2)
    stages = []
    for number in range(2):
        model = Sometimes().eval()
        keep_part(model, own_tensors(model, plan, number), CPU)
        stages.append(PipelineStage(model, plan, number))
    ids = torch.ones(2, 3, dtype=torch.long)
    handed, _ = stages[0].run({"input_ids": ids}, TeacherRequest(), None, True)
    stages[1].run({"input_ids": ids}, TeacherRequest(), handed, False, remember=False)
    with pytest.raises(ConfigError, match="used beside the hidden state"):
        stages[1].run({"input_ids": ids, "mask": ids}, TeacherRequest(), handed, False)


def test_a_hook_that_fails_leaves_the_stage_usable() -> None:
    model = llama(3, 16, 4).eval()
    plan = plan_pipeline(model, 2)
    keep_part(model, own_tensors(model, plan, 0), CPU)
    stage = PipelineStage(model, plan, 0)
    batch = batch_for("llama")
    expected, _ = stage.run(batch, TeacherRequest(), None, True)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("in the middle")

    handle = model.model.layers[0].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        stage.run(batch, TeacherRequest(), None, True)
    handle.remove()
    again, _ = stage.run(batch, TeacherRequest(), None, True)
    assert isinstance(expected, Handover)
    assert isinstance(again, Handover)
    assert torch.equal(expected.hidden, again.hidden)


@pytest.mark.parametrize(
    ("weights", "parts", "first", "last", "counts"),
    [
        ([1, 1, 1, 1], 2, 0, 0, [2, 2]),
        ([1, 1, 1, 1], 2, 2, 0, [1, 3]),
        ([1, 1, 1, 1], 2, 0, 9, [3, 1]),
        ([5, 1, 1, 1, 1, 1], 3, 0, 0, [1, 2, 3]),
        ([3], 1, 1, 1, [1]),
        ([0, 0, 7], 3, 0, 0, [1, 1, 1]),
    ],
)
def test_balance(weights: list[int], parts: int, first: int, last: int, counts: list[int]) -> None:
    got = balanced(weights, parts, first, last)

    def heaviest(cut: list[int]) -> int:
        sums, start = [], 0
        for number, count in enumerate(cut):
            extra = (first if number == 0 else 0) + (last if number == parts - 1 else 0)
            sums.append(sum(weights[start : start + count]) + extra)
            start += count
        return max(sums)

    assert sum(got) == len(weights)
    assert min(got) >= 1
    assert heaviest(got) == heaviest(counts)


def test_where_modules_are() -> None:
    plan = plan_pipeline(llama(3, 16, 4), 2)
    assert plan.stage_of("model.embed_tokens") == 0
    assert plan.stage_of(f"{plan.stages[0].layers[-1]}.mlp.up_proj") == 0
    assert plan.stage_of(plan.stages[1].layers[0]) == 1
    assert plan.stage_of("model.norm") == plan.stage_of("lm_head") == plan.stage_of("model") == 1
    assert sum(stage.bytes for stage in plan.stages) == parameter_bytes(llama(3, 16, 4))


@pytest.mark.parametrize(
    ("model", "stages", "said"),
    [
        (llama(3, 16, 2), 3, "at most 2"),
        (nn.Linear(2, 2), 2, "no ModuleList or Sequential"),
        (of("T5ForConditionalGeneration", "T5Config", d_model=16, num_layers=3, num_heads=2)(), 2, "position biases"),
    ],
    ids=["layers", "nothing to cut", "T5"],
)
def test_models_that_cannot_be_cut(model: nn.Module, stages: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        plan_pipeline(model, stages)
    assert refused.value.key == "num_devices"
    assert refused.value.value == stages
