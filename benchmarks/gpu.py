"""What only a GPU can show; ready for the day there is one, and tried on a CPU with small sizes.

1. The fused loss at 8192 tokens and a vocabulary of 151,936: time, peak memory and gradient error against float64,
   beside the same loss from logits where those fit.
2. Teacher and student in the shape of Llama 3.2 1B, 1024 tokens, batch 32: tokens per second with the teacher in the
   student's process, and of trl's trainer on the same card where trl is installed.

    python benchmarks/gpu.py [--device cuda] [--small]
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from typing import Any

import torch
import transformers

import silverspoon_ray
from benchmarks.machine import machine, write
from silverspoon_ray.losses import KLDivergenceLoss
from silverspoon_ray.losses.fused import LinearStudent, combined_loss
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.losses.targets import HiddenTargets


def synchronized(device: str) -> float:
    """Seconds, when everything that was started is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_mib(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None


def fused_loss(device: str, small: bool) -> dict[str, Any]:
    """Forward and backward of the loss from hidden states, bf16 products with float32 arithmetic."""
    tokens, vocabulary, width, teacher_width = (256, 4096, 64, 96) if small else (8192, 151936, 2048, 2560)
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(torch.bfloat16)

    hidden, weight = normal(tokens, width) * width**0.5, normal(vocabulary, width)
    theirs, head = normal(tokens, teacher_width) * teacher_width**0.5, OutputHead(normal(vocabulary, teacher_width))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    loss, targets = KLDivergenceLoss(temperature=2.0), HiddenTargets(theirs, head)

    def fused() -> torch.Tensor:
        student = LinearStudent(hidden, OutputHead(weight), torch.bfloat16)
        return combined_loss(student, targets, loss).total

    def from_logits() -> torch.Tensor:
        return loss(hidden @ weight.T, head.logits(theirs))

    result: dict[str, Any] = {"tokens": tokens, "vocabulary": vocabulary}
    for name, run in (("fused", fused), ("from logits", from_logits)):
        seconds = []
        try:
            for _ in range(5):
                hidden.grad = weight.grad = None
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                begin = synchronized(device)
                run().backward()
                seconds.append(synchronized(device) - begin)
        except torch.OutOfMemoryError:
            result[name] = "does not fit"
            continue
        peak = peak_mib(device)
        result[name] = {
            "seconds": statistics.median(seconds[1:]),
            "extra_peak_mib": None if peak is None else peak - before / 2**20,
            "error_of_hidden_gradient": gradient_error(hidden, weight, theirs, head, loss),
        }
    return result


def gradient_error(
    hidden: torch.Tensor, weight: torch.Tensor, theirs: torch.Tensor, head: OutputHead, loss: KLDivergenceLoss
) -> float:
    """Relative error of the gradient of some tokens' hidden states against float64."""
    assert hidden.grad is not None
    rows = slice(0, 32)
    exact = hidden[rows].detach().double().requires_grad_()
    logits = exact @ weight.detach().double().T
    value = loss(logits, theirs[rows].double() @ head.weight.double().T) * (32 / len(hidden))
    (expected,) = torch.autograd.grad(value, exact)
    return float((hidden.grad[rows].double() - expected).norm() / expected.norm())


def llama(small: bool, device: str) -> Any:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    if not small:  # meta-llama/Llama-3.2-1B
        size = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    heads = {
        "num_attention_heads": size["hidden_size"] // 64 if not small else 4,
        "num_key_value_heads": 8 if not small else 2,
    }
    config = transformers.LlamaConfig(**size, **heads, tie_word_embeddings=True, max_position_embeddings=2048)
    return transformers.LlamaForCausalLM(config).to(device, torch.bfloat16)


def tokens_per_second(device: str, small: bool) -> dict[str, Any]:
    """Whole training steps."""
    batch, length, steps = (2, 32, 4) if small else (32, 1024, 10)
    teacher, vocabulary = llama(small, device), 512 if small else 128256
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, vocabulary, (batch * steps, length))]
    found: dict[str, Any] = {"batch": batch, "length": length}
    common = {
        "per_device_train_batch_size": batch,
        "max_steps": steps,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "bf16": True,
        "logging_steps": steps,
    }
    for form in ("full", "hidden", "top_k"):
        args = silverspoon_ray.TrainingArguments(output_dir=tempfile.mkdtemp(), teacher_logits=form, **common)
        distiller = silverspoon_ray.ResponseBasedDistiller(
            student_model=llama(small, device), teacher_model=teacher, train_dataset=data, args=args
        )
        found[form] = speed(distiller, batch * length, steps)
    if importlib.util.find_spec("trl") is not None:
        found["trl"] = trl_speed(teacher, llama(small, device), data, common, batch * length, steps)
    return found


def speed(trainer: Any, tokens: int, steps: int) -> float:
    """Tokens per second after the first two steps."""
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(synchronized("cuda" if torch.cuda.is_available() else "cpu"))

    trainer.add_callback(Clock())
    trainer.train()
    return tokens * (steps - 2) / (ends[-1] - ends[1])


def trl_speed(teacher: Any, student: Any, data: Any, common: dict[str, Any], tokens: int, steps: int) -> float | str:
    """trl's GKD trainer on given answers (lmbda=0), forward KL (beta=0)."""
    try:
        from trl.experimental.gkd import GKDConfig, GKDTrainer
    except ImportError:
        return "this trl has no GKD trainer"
    args = GKDConfig(output_dir=tempfile.mkdtemp(), lmbda=0.0, beta=0.0, **common)
    return speed(GKDTrainer(model=student, teacher_model=teacher, args=args, train_dataset=data), tokens, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument(
        "--small", action="store_true", help="sizes that a CPU can do, to try the script; writes nothing"
    )
    options = parser.parse_args()
    here = machine()
    result = {
        "what": "fused loss and whole steps on one card",
        "fused_loss": fused_loss(options.device, options.small),
        "tokens_per_second": tokens_per_second(options.device, options.small),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "machine": here,
    }
    print(result)
    if not options.small:
        print(f"written to {write('gpu', result)}")


if __name__ == "__main__":
    main()
