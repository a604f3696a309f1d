"""GRPOTrainer, with vLLM in its process, and examples/trl_grpo.py: the gap that TRL logs, and our loss in its place."""

import json
import sys

import pytest
import torch
from composer import ROOT

pytestmark = pytest.mark.trl
for folder in ("recipes/phantom_clipping_trl", "recipes/phantom_clipping", "examples"):
    sys.path.insert(0, str(ROOT / folder))


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train one step, and return the logs and the rows of the file."""

    def run(**precision):
        import make_task
        import trl_on_cpu
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
        from trl.generation import vllm_generation
        from trl_grpo import PrecisionMixin

        class Trainer(PrecisionMixin, GRPOTrainer):
            pass

        # TRL has no setting for the rollout's dtype in this mode.
        own = {"dtype": "bfloat16", "enforce_eager": True}
        monkeypatch.setattr(vllm_generation, "LLM", lambda **given: trl_on_cpu.LLM(**(given | own)))
        if not (task := tmp_path / "task").exists():
            make_task.write_task(task, 0)
        args = GRPOConfig(
            output_dir=str(tmp_path / "trl"), use_cpu=True, use_vllm=True, vllm_mode="colocate", bf16=False,
            vllm_gpu_memory_utilization=0.1, vllm_max_model_length=64, per_device_train_batch_size=16, max_steps=1,
            gradient_accumulation_steps=2, num_generations=16, max_completion_length=8, report_to="none", seed=0,
            save_strategy="no", logging_steps=1, gradient_checkpointing=False, disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        trainer = Trainer(
            model=str(task / "on_grid"), args=args, processing_class=make_task.build_tokenizer(),
            reward_funcs=lambda completion_ids, **_: [-float(len(set(tokens))) for tokens in completion_ids],
            train_dataset=Dataset.from_dict({"prompt": make_task.prompts()}),
        )  # fmt: skip
        # One step needs no sync: vLLM has read the same weights. On a CPU it cannot load again in TRL's way.
        trainer.vllm_generation.sync_weights = lambda: None
        file = tmp_path / "metrics.jsonl"
        file.unlink(missing_ok=True)
        trainer.use_precision(file=str(file), **precision)
        trainer.train()
        return trainer.state.log_history[0], [json.loads(line) for line in file.read_text().splitlines()]

    return run


def test_the_gap_is_trls_and_our_grpo_has_its_gradient(train):
    logs, (row,) = train()
    found = row["data"]
    trls = logs["sampling/sampling_logp_difference/mean"]
    assert found["mismatch/log_prob_gap_abs_mean"] == pytest.approx(trls, rel=1e-3)
    assert found["mismatch/k3_kl"] > 1e-5 and found["critic/score/mean"] == pytest.approx(logs["reward"])
    assert row["step"] == 1 and "mismatch/k3_kl" in logs
    options = {"clip_low": 0.2, "clip_high": 0.2}
    again, _ = train(loss="vp_grpo", options=options)
    assert again["grad_norm"] == pytest.approx(logs["grad_norm"], rel=1e-4)
    assert again["loss"] == pytest.approx(logs["loss"], abs=1e-6)


def test_a_shadow_is_refused(train):
    with pytest.raises(ValueError, match="no shadow"):
        train(shadow=torch.bfloat16)
