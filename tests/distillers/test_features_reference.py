"""The same seed and data give the loss curves of silverspoon-kd, which is run here, on what it computes exactly:
unpadded samples, no cache, no accumulation, an evaluation set that divides by the batch."""

from __future__ import annotations

from typing import Any

import pytest
import silverspoon_kd

import silverspoon_ray
from tests.distillers.kinds import bert_mlm, gpt2, llama
from tests.support import PrinterCallback, token_data, trained, training_arguments

# The reference matches the beginning of a name; with `$` its patterns mean the same as ours.
MODULES = {
    llama: {r"model\.layers\.1$": r"model\.layers\.0", r"model\.layers\.3$": r"model\.layers\.1"},
    gpt2: {r"transformer\.h\.1$": r"transformer\.h\.0", r"transformer\.h\.3$": r"transformer\.h\.1"},
    bert_mlm: {
        r"bert\.encoder\.layer\.1$": r"bert\.encoder\.layer\.0",
        r"bert\.encoder\.layer\.3$": r"bert\.encoder\.layer\.1",
    },
}
# Keys that only one of the two logs: the reference leaves components out of its evaluation and logs one rate a block.
EXTRA = {"learning_rate", "eval_loss/alignment", "eval_loss/hard"}
SGD = {"optim": "sgd", "max_grad_norm": 0.05, "learning_rate": 5.0}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "mse": ("Holistic", llama, {}),
    "mse-gpt2": ("Holistic", gpt2, {}),
    "weighted-cosine": ("Holistic", llama, {"weights": (3.0, 1.0), "loss_function": "cosine"}),
    "alpha": ("Holistic", llama, {"args": {"alpha": 0.4}}),
    "alpha-weighted-bert": ("Holistic", bert_mlm, {"weights": (3.0, 1.0), "args": {"alpha": 0.4}}),
    "smooth_l1": ("Holistic", llama, {"loss_function": "smooth_l1", "loss_function_kwargs": {"beta": 0.01}}),
    "relational": ("Holistic", llama, {"loss_function": "relkd_distance"}),
    "blockwise": ("Blockwise", llama, {}),
    "blockwise-cosine-bert": ("Blockwise", bert_mlm, {"loss_function": "cosine"}),
    "blockwise-per_block": ("Blockwise", llama, {"args": {"backward_per_block": True}}),
    "blockwise-clipped": ("Blockwise", llama, {"args": SGD}),
    "blockwise-per_block-clipped": ("Blockwise", llama, {"args": {**SGD, "backward_per_block": True}}),
}


def run(package: Any, distiller: str, model: Any, settings: dict[str, Any]) -> list[dict[str, Any]]:
    student, teacher = model(0, 2), model(5, 4)
    for config in (student.config, teacher.config):
        config.use_cache = False
    keywords = {key: value for key, value in settings.items() if key not in ("args", "weights")}
    alignments = package.create_alignments(teacher, student, MODULES[model], output_selector_index=0, **keywords)
    for alignment, weight in zip(alignments, settings.get("weights", (1.0, 1.0)), strict=True):
        alignment.loss_weight = weight
    arguments = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, **settings.get("args", {})}
    if package is silverspoon_ray:
        arguments["distill_mask"] = "none"
    built = getattr(package, f"{distiller}Distiller")(
        teacher_model=teacher,
        alignments=alignments,
        train_dataset=token_data(32, seed=1),
        eval_dataset=token_data(8, seed=2),
        args=training_arguments(package, **arguments),
        **({"student_model": student} if distiller == "Holistic" else {}),
    )
    built.remove_callback(PrinterCallback)
    return trained(built)


def curves(history: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """For each key, its values with their step."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in history:
        for key, value in row.items():
            if key.split("/")[0] in ("loss", "eval_loss", "grad_norm", "learning_rate"):
                found.setdefault(key, []).append((row["step"], value))
    return found


@pytest.mark.parametrize("case", CASES)
def test_loss_curves(case: str) -> None:
    distiller, model, settings = CASES[case]
    ours = curves(run(silverspoon_ray, distiller, model, settings))
    theirs = curves(run(silverspoon_kd, distiller, model, settings))
    assert set(ours) - EXTRA == set(theirs) - EXTRA
    assert len(ours) > 4
    for key in set(ours) & set(theirs):
        if key == "grad_norm" and "clipped" in case:
            continue  # after clipping there, before it here
        assert [step for step, _ in ours[key]] == [step for step, _ in theirs[key]], key
        tolerance = 1e-3 if key.startswith("grad_norm") else 1e-4
        assert [v for _, v in ours[key]] == pytest.approx([v for _, v in theirs[key]], rel=tolerance), key
    before, after = (value for _, value in ours["eval_loss"])
    assert abs(after / before - 1) > 3e-3, "the loss hardly changes, so it would not show a wrong step"
