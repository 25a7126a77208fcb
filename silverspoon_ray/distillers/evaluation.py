"""Evaluation in which every component of the loss is that of the whole set, however it is cut into batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import nested_detach
from transformers.trainer_utils import EvalLoopOutput

from silverspoon_ray.distillers.loading import predictions
from silverspoon_ray.distillers.metrics import EvaluationMeter
from silverspoon_ray.distillers.terms import LossTerm, combine, first_rows, widen_rows
from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.lookahead import TICKET_KEY, Ticket
from silverspoon_ray.training_arguments import TrainingArguments


class ExactEvaluation(Trainer):
    """The evaluating half of a distiller; :class:`~silverspoon_ray.distillers.base.BaseDistiller` is the other."""

    args: TrainingArguments
    evaluation_meter = EvaluationMeter()

    def _loss_terms(
        self, model: nn.Module, inputs: dict[str, Any], ticket: Ticket, with_task: bool, with_outputs: bool = True
    ) -> tuple[Any, dict[str, LossTerm]]:
        raise NotImplementedError

    @property
    def wants_task(self) -> bool:
        """The student's own loss on the labels is part of what is learned."""
        return self.alpha > 0

    @property
    def alpha(self) -> float:
        """The weight of the task loss."""
        return self.args.alpha

    def summaries(self, means: Mapping[str, float]) -> dict[str, float]:
        """Further components that follow from the others, for the logs."""
        return {}

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Loss, logits and labels of one evaluation batch; works without labels too."""
        ticket = inputs.pop(TICKET_KEY, None) or Ticket()
        inputs = self._prepare_inputs(inputs)
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        labels = nested_detach(tuple(inputs[name] for name in self.label_names)) if has_labels else None
        rows = self._rows(inputs)[0]
        counted_inputs = {**inputs, TICKET_KEY: ticket}
        self.leave_out_repeated(counted_inputs)
        counted_inputs.pop(TICKET_KEY)
        wants_task = self.wants_task or self.args.e2e_eval_loss == "forward"
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs, terms = self._loss_terms(
                model, counted_inputs, ticket, wants_task and has_labels, not prediction_loss_only
            )
        for name, term in terms.items():
            self.evaluation_meter.add(name, term.mean, term.count)
        self._weights = {name: replace(term, mean=torch.zeros(()), count=1) for name, term in terms.items()}
        loss = combine(terms, dict.fromkeys(terms, 1.0), self.alpha, False).detach()
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", None) or ["cache"]
        logits = nested_detach(predictions(outputs, ignore_keys))
        if isinstance(labels, tuple) and len(labels) == 1:
            labels = labels[0]
        return loss, widen_rows(logits, rows) if ticket.cut is not None else logits, labels

    def _rows(self, inputs: Mapping[str, Any]) -> tuple[int, int]:
        """Rows of this evaluation batch, and how many of them are real samples of this rank."""
        rows = next((v.shape[0] for v in inputs.values() if isinstance(v, torch.Tensor) and v.dim() > 0), 1)
        state = self.accelerator.gradient_state
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return rows, rows
        return rows, min(max(state.remainder - self.args.process_index * rows, 0), rows)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        """Trainer's loop; the losses it reports are those of the whole set, each component over what it counts."""
        self.evaluation_meter = EvaluationMeter()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        means = self.evaluation_meter.means(self._reduce_sum)
        if means:
            if "hard" in means and self.args.e2e_eval_loss == "forward":
                output.metrics[f"{metric_key_prefix}_loss/e2e"] = means["hard"]
            if not self.wants_task:
                means.pop("hard", None)
            for name, mean in {**means, **self.summaries(means)}.items():
                output.metrics[f"{metric_key_prefix}_loss/{name}"] = mean
            terms = {name: replace(self._weights[name], mean=torch.tensor(mean)) for name, mean in means.items()}
            total = combine(terms, dict.fromkeys(terms, 1.0), self.alpha, False)
            output.metrics[f"{metric_key_prefix}_loss"] = total.item()
        return output

    def _reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.args.world_size == 1:
            return tensor
        return self.accelerator.gather(tensor.unsqueeze(0).to(self.args.device)).sum(dim=0).cpu()

    def leave_out_repeated(self, batch: dict[str, Any]) -> None:
        """Take out of a batch what accelerate has put there a second time to give every rank an equal last batch."""
        rows, real = self._rows(batch)
        if real < rows:
            ticket: Ticket = batch[TICKET_KEY]
            ticket.cut = first_rows(max(real, 1), rows)
            ticket.repeated = real == 0
            for key, value in batch.items():
                if key != TICKET_KEY:
                    batch[key] = map_tensors(ticket.cut, value)
