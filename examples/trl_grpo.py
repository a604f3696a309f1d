"""TRL with this package: the mismatch and its alarm at every step, a shadow ratio, and the losses.

    class Trainer(PrecisionMixin, AsyncGRPOTrainer):  # or GRPOTrainer
        pass

    trainer = Trainer(model=..., args=..., reward_funcs=..., train_dataset=...)
    trainer.use_precision(loss="vp_pg_seq_is", file="outputs/run/metrics.jsonl")
    trainer.train()

Copy this file. `verl-precision report outputs/run` reads the metrics; docs/metrics.md defines them.

TRL's own code runs, and is not copied: `compute_loss` gets a stand-in for the model, which sees the log-probs where the
model returns them. Limits: TRL 1.16.0, because the trainers' inner methods change between releases; one model in each
process (DDP is untried; no FSDP2, no DeepSpeed, no PEFT); no Liger kernel. Set `logging_steps=1` for one row a step. In
GRPOTrainer the ratio divides by the trainer's own log-probs, so it has no beta, and there is no shadow.
"""

import copy
import json
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl_precision.losses import POLICY_LOSSES, Aggregation
from verl_precision.losses.settings import Ratio, clip_range
from verl_precision.mismatch import MismatchMonitor
from verl_precision.mismatch.settings import AlarmSettings

TRL = "1.16.0"


class ModelSeen:
    """Stands for the model in one `compute_loss`: `seen` gets each output, and may change it."""

    def __init__(self, model: torch.nn.Module, seen: Any) -> None:
        vars(self).update(model=model, seen=seen)

    def __getattr__(self, name: str) -> Any:
        """Give everything else of the model."""
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and show what it returns."""
        return self.seen(self.model(*args, **kwargs), args, kwargs)


class PrecisionMixin:
    """Comes before the trainer in the bases; shapes: B responses, T tokens."""

    def use_precision(
        self,
        loss: str | None = None,
        options: dict[str, float] | None = None,
        shadow: torch.dtype | None = None,
        ratio: str = "training",
        alarm: AlarmSettings | None = None,
        file: str | None = None,
    ) -> None:
        """Say what to do in this run, before `train`.

        Args:
            loss: A name of `POLICY_LOSSES`, in place of TRL's loss. None: TRL's own.
            options: Numbers of that loss: {"clip_high": 0.28}, {"threshold": 3.0}.
            shadow: The rollout's dtype: a second forward of the same weights, rounded to it, splits the gap into alpha
                and beta, and shows phantom clipping. AsyncGRPOTrainer alone.
            ratio: "shadow" makes the ratio that of the shadow, with the trainer's gradient: beta is out of it.
            alarm: When to raise an alarm, and whether it ends the run.
            file: Metrics of each step, as JSON lines; an existing file is extended.
        """
        if version("trl") != TRL:
            warnings.warn(f"trl {version('trl')}: this file was tried with {TRL} alone", stacklevel=2)
        if ratio == "shadow" and shadow is None:
            raise ValueError("ratio='shadow' needs a shadow: shadow=torch.bfloat16, the rollout's dtype")
        if not hasattr(self, "rollout_worker") and (shadow is not None or not self.args.use_vllm):  # GRPOTrainer
            raise ValueError("GRPOTrainer needs use_vllm=True, and no shadow: its ratio has no beta")
        self.vp_loss, self.vp_options, self.vp_ratio, self.vp_file = loss, options or {}, ratio, file
        stated = Ratio("token", "ratio") if loss is None else POLICY_LOSSES[loss].ratio
        low, high = (self.vp_options.get(f"clip_{side}", getattr(self, f"epsilon_{side}")) for side in ("low", "high"))
        bounds = {"clip_ratio": None, "clip_ratio_low": low, "clip_ratio_high": high}
        self.vp_monitor = MismatchMonitor(alarm, clip_range(stated, bounds) if stated else None)
        self.vp_seen, self.vp_further = {}, {}  # log-probs of a forward; metrics beside the monitor's
        # A copy from before accelerate wraps the forward in autocast; it takes the weights at each step.
        self.vp_shadow = None if shadow is None else copy.deepcopy(self.model).to(shadow).eval().requires_grad_(False)
        self.vp_shadow_step = -1

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return TRL's loss, or the chosen one, and measure this micro-batch."""
        packed = "token_index" in inputs  # AsyncGRPOTrainer: many responses in a row
        seen = ModelSeen(model, self.vp_see_packed) if packed else model
        trls = super().compute_loss(seen, inputs, return_outputs, num_items_in_batch)
        batch = self.vp_batch_of_packed(inputs) if packed else self.vp_batch_of_padded(inputs)
        gap_of = batch["trainer_log_probs"] if packed else batch["proximal_log_probs"]  # the weights of the rollout
        if self.model.training:
            self.vp_measure(gap_of, batch)
        if self.vp_loss is None:
            return trls
        if "ratio_log_probs" in batch:
            batch["trainer_log_probs"] = batch["ratio_log_probs"]
        ranks, micro_batches = self.accelerator.num_processes, self.current_gradient_accumulation_steps
        tokens = inputs["global_n_tokens"][0] if packed else inputs["num_items_in_batch"]
        if not packed:  # the tokens of all steps of a generation
            micro_batches /= self.args.steps_per_generation
        aggregation = Aggregation("token-mean", num_tokens=int(tokens), dp_size=ranks)
        output = POLICY_LOSSES[self.vp_loss](batch, aggregation, **self.vp_options)
        return output.loss / micro_batches

    def vp_measure(self, trainer_log_probs: Tensor, batch: dict[str, Tensor], **others: Any) -> None:
        """Measure a micro-batch; the place for `versions_behind`, and for your own statistics (`vp_monitor.add`)."""
        mask, advantages = batch["response_mask"], batch["advantages"]
        ended = mask.sum(dim=1) < self.args.max_completion_length
        others |= {"shadow": batch.get("shadow"), "ratio": self.vp_ratio, "ended": ended}
        self.vp_monitor.measure(trainer_log_probs, batch["rollout_log_probs"], mask, advantages, **others)

    def vp_see_packed(self, outputs: Any, args: Any, kwargs: Any) -> Any:
        """Keep the log-probs of the model's forward, and replace their values by the shadow's if it gives the ratio."""
        self.vp_seen = {"trainer_log_probs": outputs.log_probs}
        if self.vp_shadow is not None:
            self.vp_seen["shadow"] = self.vp_forward_shadow(args, kwargs)
            if self.vp_ratio == "shadow":
                outputs.log_probs = self.vp_seen["shadow"] + (outputs.log_probs - outputs.log_probs.detach())
                self.vp_seen["ratio_log_probs"] = outputs.log_probs
        return outputs

    @torch.no_grad()
    def vp_forward_shadow(self, args: Any, kwargs: Any) -> Tensor:
        """Return the log-probs of the present weights, rounded to the shadow's dtype and computed in it, as FP32."""
        if self.vp_shadow_step != self.state.global_step:
            changed, weights = 0, list(zip(self.vp_shadow.parameters(), self.model.parameters(), strict=True))
            for mine, theirs in weights:
                rounded = theirs.to(mine.dtype)
                changed += int((rounded != mine).sum())
                mine.copy_(rounded)
            if self.vp_shadow_step >= 0 and self.vp_shadow.dtype == torch.bfloat16:  # weights that moved on its grid
                self.vp_further["precision/bf16_crossings_fraction"] = changed / sum(w.numel() for w, _ in weights)
            self.vp_shadow_step = self.state.global_step
        with torch.autocast(self.accelerator.device.type, enabled=False):
            return self.vp_shadow(*args, **kwargs).log_probs.float()

    def vp_batch_of_packed(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a packed row, [B, T]; AsyncGRPO's ratio divides by the rollout's log-probs."""
        trained = inputs["token_index"] >= 0
        places, segments = inputs["token_index"][trained], inputs["segment_id"][trained]
        lengths = torch.bincount(segments).tolist()

        def padded(flat: Tensor) -> Tensor:
            return pad_sequence(flat.split(lengths), batch_first=True)

        batch = {name: padded(values.flatten()[places]) for name, values in self.vp_seen.items()}
        batch["rollout_log_probs"] = batch["proximal_log_probs"] = padded(inputs["old_log_probs"][trained])
        batch["advantages"] = padded(inputs["advantages"][trained])
        return batch | {"response_mask": padded(torch.ones_like(segments))}

    def vp_batch_of_padded(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of GRPOTrainer's micro-batch, [B, T]; it needs `use_vllm=True`."""
        current, mask = self.vp_seen["trainer_log_probs"], inputs["completion_mask"] * inputs.get("tool_mask", 1)
        batch = {"trainer_log_probs": current, "rollout_log_probs": inputs["sampling_per_token_logps"]}
        batch |= {"response_mask": mask, "advantages": inputs["advantages"]}
        batch["proximal_log_probs"] = inputs.get("old_per_token_logps", current.detach())
        if "importance_sampling_ratio" in inputs:  # TRL's correction, [B, T] or [B, 1]
            batch["rollout_is_weights"] = inputs["importance_sampling_ratio"].expand_as(current)
        return batch

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the log-probs of GRPOTrainer's forward; the last one of a micro-batch is the update's."""
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.vp_seen = {"trainer_log_probs": found[0]}
        return found

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """End a step: add the metrics to TRL's, log the alarms, and write a line of the file."""
        if self.vp_seen and self.model.training:
            self.vp_seen, step, rewards = {}, self.state.global_step, self._metrics["train"].get("reward", [])
            if rewards:
                self.vp_further["critic/score/mean"] = sum(rewards) / len(rewards)
            scaler = getattr(self.accelerator, "scaler", None)  # accelerate's, of FP16
            if scaler is not None:
                self.vp_further["precision/loss_scale"] = scaler.get_scale()
                self.vp_further["precision/skipped_steps"] = float(self.optimizer.step_was_skipped)
            report, self.vp_further = self.vp_monitor.end_of_step(step, self.vp_further), {}
            logs.update(report.metrics)
            if self.vp_file and self.accelerator.is_main_process:
                Path(self.vp_file).parent.mkdir(parents=True, exist_ok=True)
                with open(self.vp_file, "a") as file:
                    file.write(json.dumps({"step": step, "data": report.metrics}) + "\n")
        super().log(logs, start_time)
