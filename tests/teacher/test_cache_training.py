"""Training with ``teacher_cache``: the curves of the uncached run, and a teacher that is not asked twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import silverspoon_ray
from silverspoon_ray import BlockwiseDistiller, HolisticDistiller, ResponseBasedDistiller, create_alignments
from silverspoon_ray.errors import CacheError
from silverspoon_ray.teacher.cache.identity import digests_of, fingerprint, identity_of, source_digests, tensor_digest
from silverspoon_ray.teacher.cache.teacher import AbsentTeacher
from silverspoon_ray.teacher.local import LocalTeacher
from tests.distillers.kinds import KINDS, Collator, Padding
from tests.distillers.ranks import on_ranks
from tests.distillers.test_soft_targets import distiller
from tests.support import llama, trained, training_arguments, without_times
from tests.teacher.cache_kinds import Counting

History = list[dict[str, Any]]
FORMS = ["full", "hidden", "top_k", "sampled"]
EPOCHS: dict[str, Any] = {"max_steps": 12, "eval_steps": 4, "teacher_top_k": 4}  # three epochs of 16 samples


def response(kind: str, cache: Path | None, teacher: Any = None, **keywords: Any) -> tuple[History, Any, Any]:
    student = KINDS[kind].model(0, 1)
    keywords = {**EPOCHS, **keywords}
    built = distiller(
        kind,
        student,
        teacher or KINDS[kind].model(5, 2),
        teacher_cache=None if cache is None else str(cache),
        **keywords,
    )
    return trained(built), student.state_dict(), built


def curve(history: History) -> History:
    return without_times(history)


def nearly(left: History, right: History) -> None:
    """As far as rounding goes: an answer may have been computed in another batch."""
    assert len(left) == len(right)
    for one, other in zip(curve(left), curve(right), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def asked(history: History) -> tuple[float, float]:
    logs = [row for row in history if "teacher/forwards" in row]
    return sum(row["teacher/forwards"] for row in logs), sum(row["teacher/cache_hits"] for row in logs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert_mlm", "t5", "vit", "perceptron"])
def test_three_epochs(kind: str, form: str, tmp_path: Path) -> None:
    """The first epoch has the bits of the uncached run, the others and the next run never ask."""
    if form == "hidden" and kind in ("vit", "perceptron"):
        pytest.skip("no output head")
    plain, _, _ = response(kind, None, teacher_logits=form)
    cold, student, _ = response(kind, tmp_path, teacher_logits=form)
    assert curve(cold)[:4] == curve(plain)[:4]
    if form != "sampled":
        nearly(cold, plain)
    assert asked(cold) == (4, 32)
    teacher = Counting(KINDS[kind].model(5, 2))
    teacher.broken = True
    warm, again, _ = response(kind, tmp_path, teacher, teacher_logits=form)
    assert curve(warm) == curve(cold)
    assert all(torch.equal(value, again[name]) for name, value in student.items())
    assert asked(warm) == (0, 48)
    assert sum(row["teacher/bytes_per_step"] for row in warm if "teacher/bytes_per_step" in row) == 0


OTHER = {
    "batches of 2": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "order": {"data_seed": 7},
    "longer": {"padding": Padding("right", 5, 3)},
    "left": {"padding": Padding("left", 2, 7)},
    "one ahead": {"teacher_prefetch": 0, "alpha": 0.5},
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert_mlm", "t5"])
def test_other_batches_do_not_ask(kind: str, other: str, tmp_path: Path) -> None:
    if kind == "t5" and other == "left":
        pytest.skip("without position ids, where a sample begins belongs to its content")
    response(kind, tmp_path, max_steps=4)
    teacher = Counting(KINDS[kind].model(5, 2))
    teacher.broken = True
    warm, _, _ = response(kind, tmp_path, teacher, **OTHER[other])
    plain, _, _ = response(kind, None, **OTHER[other])
    nearly(warm, plain)


def test_partly_filled(tmp_path: Path) -> None:
    """A run that was stopped early, and one that goes on."""
    response("llama", tmp_path, max_steps=2, eval_strategy="no")
    cold, _, _ = response("llama", tmp_path)
    nearly(cold, response("llama", None)[0])
    assert asked(cold) == (2, 8 + 32)


def test_a_run_that_fails_keeps_what_it_has(tmp_path: Path) -> None:
    teacher = Counting(KINDS["llama"].model(5, 2))
    student = KINDS["llama"].model(0, 1)
    built = distiller("llama", student, teacher, teacher_cache=str(tmp_path), teacher_prefetch=0, eval_strategy="no")

    class Stops(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("enough")

    built.add_callback(Stops())
    with pytest.raises(RuntimeError, match="enough"):
        trained(built)
    assert len(list(tmp_path.glob("*.arrow"))) == 1


def test_distill_mask_none(tmp_path: Path) -> None:
    """Padding counts there, so answers to it are kept too."""
    settings = {"distill_mask": "none", "max_steps": 4}
    plain, _, _ = response("llama", None, **settings)
    cold, _, _ = response("llama", tmp_path, **settings)
    warm, _, _ = response("llama", tmp_path, **settings)
    assert curve(cold) == curve(warm) == curve(plain)
    with pytest.raises(CacheError, match="padding 'left out'"):
        response("llama", tmp_path)


# ---- features ------------------------------------------------------------------------------------------------

FEATURES = {
    "llama": r"model\.layers\.1",
    "gpt2": r"transformer\.h\.1",
    "bert_mlm": r"bert\.encoder\.layer\.1",
    "t5": r"decoder\.block\.1",
    "vit": r"vit\.layers\.1",
    "perceptron": r"layers\.0",
}


def features(kind: str, cache: Path | None, teacher: Any = None, blockwise: bool = False, **keywords: Any) -> History:
    make = KINDS[kind].model
    student = make(0, 2 if kind != "perceptron" else 1)
    model = make(5, 2 if kind != "perceptron" else 1)
    alignments = create_alignments(model, student, {FEATURES[kind]: FEATURES[kind]})
    arguments = training_arguments(
        silverspoon_ray, teacher_cache=None if cache is None else str(cache), **{"max_steps": 8, **keywords}
    )
    made: Any = BlockwiseDistiller if blockwise else HolisticDistiller
    return trained(
        made(
            student_model=student,
            teacher_model=teacher(model) if teacher else model,
            alignments=alignments,
            train_dataset=KINDS[kind].data(16, 1),
            data_collator=Collator(kind),
            args=arguments,
        )
    )


def silent(model: torch.nn.Module) -> Counting:
    teacher = Counting(model)
    teacher.broken = True
    return teacher


@pytest.mark.parametrize("kind", FEATURES)
def test_holistic(kind: str, tmp_path: Path) -> None:
    plain, cold = features(kind, None), features(kind, tmp_path)
    assert curve(cold)[:4] == curve(plain)[:4]
    nearly(cold, plain)
    # A decoder's padding is a part of its content where no mask says otherwise; the batches are the same here.
    warm = features(kind, tmp_path, None if kind == "t5" else silent)
    assert curve(warm) == curve(cold)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_blockwise(kind: str, tmp_path: Path) -> None:
    plain, cold = features(kind, None, blockwise=True), features(kind, tmp_path, blockwise=True)
    nearly(cold, plain)
    assert curve(features(kind, tmp_path, silent, blockwise=True)) == curve(cold)


def test_features_in_half_precision(tmp_path: Path) -> None:
    """On disk as on the wire, and the first epoch sees what the second does."""
    cold = features("llama", tmp_path, teacher_wire_dtype="bfloat16")
    warm = features("llama", tmp_path, silent, teacher_wire_dtype="bfloat16")
    assert curve(cold) == curve(warm)
    sizes = [sum(file.stat().st_size for file in path.glob("*.arrow")) for path in (tmp_path,)]
    features("llama", tmp_path / "full")
    assert sizes[0] < 0.8 * sum(file.stat().st_size for file in (tmp_path / "full").glob("*.arrow"))


def test_another_kind_of_distiller_is_refused(tmp_path: Path) -> None:
    features("llama", tmp_path)
    with pytest.raises(CacheError, match=r"request\.logits 'full', which this run needs; this one has None"):
        response("llama", tmp_path)


# ---- ranks ---------------------------------------------------------------------------------------------------


def on_a_rank(cache: str, placement: str | None, seed: int) -> tuple[History, int]:
    teacher = llama(2, 32, 3)
    built = distiller(
        "llama",
        KINDS["llama"].model(0, 1),
        teacher,
        teacher_cache=cache,
        teacher_placement=placement,
        max_steps=4,
        per_device_train_batch_size=2,
        data_seed=seed,
        eval_strategy="no",
    )
    return trained(built), sum(row.get("teacher/forwards", 0) for row in built.state.log_history)


def test_ranks(tmp_path: Path) -> None:
    """Two ranks fill it, each its own part; one process, and two that divide the data otherwise, ask nothing."""
    teacher = llama(2, 32, 3)
    first = on_ranks(on_a_rank, str(tmp_path), None, 0)
    assert [forwards for _, forwards in first] == [4, 4]
    assert len(list(tmp_path.glob("*.arrow"))) == 2
    other = on_ranks(on_a_rank, str(tmp_path), None, 3)
    assert [forwards for _, forwards in other] == [0, 0]
    alone, _, _ = response("llama", tmp_path, silent(teacher), max_steps=4, eval_strategy="no")
    nearly(alone, response("llama", None, copy.deepcopy(teacher), max_steps=4, eval_strategy="no")[0])


def test_a_teacher_spread_over_ranks(tmp_path: Path) -> None:
    """One rank has all it needs, the other has nothing: both ask, as the parameters are gathered together."""
    cold = on_ranks(on_a_rank, str(tmp_path), "sharded", 0)
    shards = sorted(tmp_path.glob("*.arrow"))
    assert len(shards) == 2
    shards[0].unlink()
    half = on_ranks(on_a_rank, str(tmp_path), "sharded", 0)
    assert [forwards for _, forwards in half] == [4, 4]
    nearly(half[0][0], cold[0][0])
    warm = on_ranks(on_a_rank, str(tmp_path), "sharded", 0)
    assert [forwards for _, forwards in warm] == [0, 0]
    assert curve(warm[0][0]) == curve(half[0][0])


# ---- whose cache it is ---------------------------------------------------------------------------------------


class Tokenizer:
    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


def other_weight(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    return model


def other_config(model: Any) -> Any:
    model.config.rms_norm_eps = 0.5
    return model


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "weights": ({}, other_weight, r"teacher\.weights"),
    "dtype": ({}, lambda model: model.bfloat16(), r"teacher\.(weights|dtype)"),
    "configuration": ({}, other_config, r"teacher\.config"),
    "form": ({"teacher_logits": "top_k"}, lambda model: model, r"request\.logits 'top_k'.*'full'"),
    "wire dtype": ({"teacher_wire_dtype": "bfloat16"}, lambda model: model, r"request\.wire_dtype 'bfloat16'.*None"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    keywords, change, said = REFUSED[case]
    response("llama", tmp_path, max_steps=1)
    with pytest.raises(CacheError, match=said) as refused:
        response("llama", tmp_path, change(KINDS["llama"].model(5, 2)), max_steps=1, **keywords)
    assert refused.value.key == "teacher_cache"
    assert refused.value.value == str(tmp_path)
    assert "this one has" in str(refused.value)


@pytest.mark.parametrize("change", ["temperature", "top_k", "seed"])
def test_refused_details_of_a_form(change: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"teacher_logits": "sampled", "max_steps": 1}
    changed = {
        "temperature": {"soft_loss_fn_kwargs": {"temperature": 2.0}},
        "top_k": {"teacher_top_k": 5},
        "seed": {"seed": 1},
    }
    response("llama", tmp_path, **settings)
    with pytest.raises(CacheError, match=rf"request\.{change}"):
        response("llama", tmp_path, **{**settings, **changed[change]})
    # What a form does not use may differ.
    response("llama", tmp_path / "full", max_steps=1)
    response("llama", tmp_path / "full", max_steps=1, **changed[change])


def test_refused_tokenizer(tmp_path: Path) -> None:
    def run(tokenizer: Any) -> None:
        args = training_arguments(silverspoon_ray, teacher_cache=str(tmp_path), max_steps=1)
        data = KINDS["llama"].data(4, 1)
        make = KINDS["llama"].model
        collate = Collator("llama")
        built = ResponseBasedDistiller(make(0, 1), make(5, 2), data, data_collator=collate, args=args)
        assert built.cache.tokenizer is None
        ResponseBasedDistiller(
            make(0, 1), make(5, 2), data, data_collator=collate, args=args, processing_class=tokenizer
        )

    run(Tokenizer("a", "b"))
    run(Tokenizer("a", "c"))  # the manifest knew of none
    other = tmp_path / "other"
    from silverspoon_ray.teacher.cache.manifest import Manifest, agree, tokenizer_hash
    from silverspoon_ray.teacher.cache.place import Place

    identity = identity_of(llama(0), digests_of(llama(0)))
    place = Place(str(other))
    place.make()
    agree(place, Manifest({}, identity, tokenizer_hash(Tokenizer("a", "b"))))
    agree(place, Manifest({}, identity, tokenizer_hash(Tokenizer("a", "b"))))
    agree(place, Manifest({}, identity, None))
    with pytest.raises(CacheError, match="tokenizer"):
        agree(place, Manifest({}, identity, tokenizer_hash(Tokenizer("b", "a"))))


def test_refused_modules(tmp_path: Path) -> None:
    features("llama", tmp_path, max_steps=1)
    FEATURES["llama"], before = r"model\.layers\.0", FEATURES["llama"]
    try:
        with pytest.raises(CacheError, match=r"request\.outputs \['model.layers.0'\].*\['model.layers.1'\]"):
            features("llama", tmp_path, max_steps=1)
    finally:
        FEATURES["llama"] = before


def test_the_student_itself_is_refused(tmp_path: Path) -> None:
    model = llama(0)
    args = training_arguments(silverspoon_ray, teacher_cache=str(tmp_path))
    with pytest.raises(CacheError, match="the teacher is the student itself"):
        ResponseBasedDistiller(model, model, args=args)


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for uri in (str(tmp_path / "file" / "x"), "nowhere://bucket"):
        with pytest.raises(CacheError) as refused:
            response("perceptron", Path(uri) if ":" not in uri else uri)  # type: ignore[arg-type]
        assert refused.value.value == uri


def test_a_teacher_that_does_not_say_who_it_is(tmp_path: Path) -> None:
    from tests.teacher.fake import FakeTeacher

    with pytest.raises(CacheError, match="does not say what it is"):
        response("llama", tmp_path, FakeTeacher(llama(0)))


# ---- without a teacher ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["full", "hidden"])
def test_without_a_teacher(form: str, tmp_path: Path) -> None:
    """Only its structure, and, for hidden states, the head that the cache keeps."""
    cold, _, built = response("llama", tmp_path, teacher_logits=form)
    absent = AbsentTeacher(built.teacher.structure, built.teacher.identity)
    warm, _, _ = response("llama", tmp_path, absent, teacher_logits=form)
    assert curve(warm) == curve(cold)
    student = KINDS["llama"].model(0, 1)
    built = distiller("llama", student, absent, teacher_cache=str(tmp_path), teacher_logits=form)
    built.train_dataset = KINDS["llama"].data(4, 99)
    with pytest.raises(CacheError, match="there is one that is not") as refused:
        trained(built)
    assert "augmentation" in str(refused.value)


# ---- fingerprints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert_mlm", "t5", "vit", "perceptron"])
def test_fingerprints(kind: str, tmp_path: Path) -> None:
    """However it comes; one element, the dtype or a name more, and it is another."""
    model = KINDS[kind].model(5, 2)
    mine = digests_of(model)
    sources: list[Any] = [lambda: KINDS[kind].model(5, 2), model]
    if kind != "perceptron":
        model.save_pretrained(tmp_path)
        sources.append(str(tmp_path))
    assert {fingerprint(source_digests(source)) for source in sources} == {fingerprint(mine)}
    assert LocalTeacher(model).weight_digests() == mine
    identity = identity_of(model, mine)
    assert identity.dtype == "float32"
    for source in sources:
        structure = LocalTeacher(source if isinstance(source, torch.nn.Module) else KINDS[kind].model(5, 2)).structure
        assert identity_of(structure, source_digests(source)) == identity
    changed = other_weight(KINDS[kind].model(5, 2))
    others = [fingerprint(digests_of(m)) for m in (changed, copy.deepcopy(model).bfloat16(), KINDS[kind].model(6, 2))]
    assert len({*others, fingerprint(mine)}) == 4


def test_a_directory_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in another dtype than it was saved in, and with a head that is the embedding."""
    from silverspoon_ray.teacher.cache import identity

    model = llama(3, 32, 3, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(identity, "PART_BYTES", 5000)
    monkeypatch.setattr(identity, "build_model", None)  # it never has to build the whole
    assert source_digests(str(tmp_path)) == digests_of(model)
    assert source_digests(str(tmp_path), dtype=torch.bfloat16) == digests_of(model.bfloat16())


def test_digests_see_order_and_shape() -> None:
    tensor = torch.arange(1000.0)
    assert tensor_digest(tensor) == tensor_digest(tensor.clone())
    assert tensor_digest(tensor) != tensor_digest(tensor.flip(0))
    assert tensor_digest(tensor) != tensor_digest(tensor.view(10, 100))
    assert tensor_digest(tensor.view(10, 100).t()) == tensor_digest(tensor.view(10, 100).t().contiguous())
    assert tensor_digest(torch.empty(0)) == tensor_digest(torch.empty(0))
    assert tensor_digest(torch.tensor(1.0)) != tensor_digest(torch.tensor(2.0))
    assert tensor_digest(tensor.to(torch.float8_e4m3fn)).startswith("float8_e4m3fn:")


def test_autocast_belongs_to_a_local_teacher(tmp_path: Path) -> None:
    """It answers in the student's precision; a teacher elsewhere does not."""
    cold, _, _ = response("llama", tmp_path, max_steps=4, bf16=True)
    plain, _, _ = response("llama", None, max_steps=4, bf16=True)
    warm, _, _ = response("llama", tmp_path, max_steps=4, bf16=True)
    assert curve(cold) == curve(plain) == curve(warm)
    with pytest.raises(CacheError, match="autocast None, which this run needs; this one has 'bf16'"):
        response("llama", tmp_path, silent(KINDS["llama"].model(5, 2)), max_steps=4, bf16=True)
