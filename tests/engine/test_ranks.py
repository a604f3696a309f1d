"""Real FSDP2 ranks over gloo, real verl engines on a CPU: what `ranks.py` saw, for 1 and 2 ranks."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("ranks.py")


@pytest.fixture(scope="session", params=[1, 2], ids=["1 rank", "2 ranks"])
def seen(request, tmp_path_factory) -> list[dict]:
    """Run all scenarios once per world size; return what each rank saw."""
    scratch = tmp_path_factory.mktemp(f"ranks_{request.param}")
    processes = []
    for rank in range(request.param):
        command = [sys.executable, str(RANKS), str(rank), str(request.param), str(scratch / "rendezvous"), str(scratch)]
        with (scratch / f"log_{rank}.txt").open("w") as log:
            processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "VERL_PLATFORM": "cpu"})
            )
    try:
        codes = [process.wait(timeout=280) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * request.param, "\n".join(log.read_text()[-4000:] for log in scratch.glob("log_*.txt"))
    return [json.loads((scratch / f"rank_{rank}.json").read_text()) for rank in range(request.param)]


def test_parameters_are_fp32_and_the_model_computes_in_fp16(seen):
    for rank in seen:
        found = rank["precision"]
        assert found["engine"] == "FSDPEngineWithLMHeadOnCPU"
        assert found["parameters"] == found["rope"] == ["torch.float32"], "master weights, RoPE's frequencies"
        assert found["seen"] == dict.fromkeys(("inputs", "weight", "output"), "torch.float16")


def test_unscaled_gradients_are_those_of_fp32_within_fp16_rounding(seen):
    """FP16 has unit roundoff 2^-11 = 4.9e-4; over four layers and two passes the norm may err by a few times that."""
    for rank in seen:
        found = rank["precision"]
        assert found["relative_error"] < 8 * 2**-11
        assert found["upstream_bf16_relative_error"] > 4 * found["relative_error"], "BF16 is 8 times coarser"


def test_inf_on_one_rank_skips_the_step_on_all_and_the_scale_halves_then_grows(seen):
    for rank in seen:
        steps = rank["overflow"]
        assert [step["changed"] for step in steps] == [True, False, True, True]
        assert all(step["finite"] for step in steps)
        assert [step["scale"] for step in steps] == [1024, 512, 512, 1024]
        metrics = [step["metrics"] for step in steps]
        assert [m["precision/loss_scale"] for m in metrics] == [[1024], [512], [512], [1024]]
        assert [m["precision/skipped_steps"] for m in metrics] == [[0], [1], [0], [0]]
        assert [m["precision/overflow_rank_count"] for m in metrics] == [[0], [1], [0], [0]]
        assert all(0 <= m["precision/grad_underflow_fraction"][0] < 0.01 for m in metrics)


def test_schedule_and_grad_norm_wait_for_a_skipped_step(seen):
    for rank in seen:
        steps = rank["overflow"]
        lrs = [step["lr"] for step in steps]
        assert lrs[1] == lrs[0] and lrs[3] < lrs[2] < lrs[1]
        assert [math.isfinite(step["metrics"].get("grad_norm", math.inf)) for step in steps] == [
            True,
            False,
            True,
            True,
        ]
        assert "grad_norm" not in steps[1]["metrics"], "an inf would become the mean over mini-batches"


def test_several_updates_in_one_step_are_reported_once_and_advance_the_schedule_once(seen):
    for rank in seen:
        first, second, last = rank["mini_batches"]
        assert not any(key.startswith("precision/") for step in (first, second) for key in step["metrics"])
        assert last["metrics"]["precision/skipped_steps"] == [1]
        assert last["metrics"]["precision/overflow_rank_count"] == [1]
        assert last["lr"] == pytest.approx(rank["overflow"][0]["lr"])


def test_replicas_of_hsdp_agree(seen):
    if len(seen) == 1:
        pytest.skip("HSDP needs two ranks")
    for rank in seen:
        assert rank["hsdp"]["mesh"] == [2, 1]
        assert not rank["hsdp"]["changed"] and rank["hsdp"]["scale"] == 512


def test_scale_at_its_minimum_stops_the_run_with_a_diagnosis(seen):
    for rank in seen:
        found = rank["minimum"]
        assert found["scales"] == [1, 1], "2 -> 1, one step at the minimum, and the second raises"
        assert found["error"] == "LossScaleError"
        assert "loss_scale.minimum=1" in found["message"] and "on 1 rank(s)" in found["message"]
        assert "stop_after_steps_at_minimum=2" in found["message"] and "precision=bf16" in found["message"]
    assert "model.embed_tokens.weight" in seen[0]["minimum"]["message"]


def test_resume_goes_on_exactly(seen):
    for rank in seen:
        found = rank["resume"]
        assert found["loaded"] == found["saved"] == {"scale": 512, "growth_tracker": 1, "steps_at_minimum": 0}
        assert found["continued"] == found["uninterrupted"]
        assert found["continued"][-1]["scale"] == 1024, "the growth counter went on: 5 good steps, one before the save"


def test_upstream_starts_again_at_its_initial_scale(seen):
    for rank in seen:
        found = rank["resume"]
        assert found["upstream_saved"]["scale"] < 65536
        assert found["upstream_loaded"] == {**found["upstream_saved"], "scale": 65536, "_growth_tracker": 0}


def test_checkpoint_without_a_scale_loads_with_a_warning(seen):
    for rank in seen:
        (warning,) = rank["resume"]["old_warning"]
        assert "no loss_scale.json" in warning and "starts at 1024" in warning
        assert rank["resume"]["old_checkpoint"]["scale"] == 1024


def test_upstream_on_a_cpu_does_not_scale_and_takes_16_bit_log_probs(seen):
    """Traps 3.3, 3.5 and 3.6: the scaler is off, the norm is inf, the schedule goes on."""
    for rank in seen:
        found = rank["upstream"]
        assert found["scaler_enabled"] is False
        assert found["log_probs"] == "torch.float16"
        assert found["grad_norm_on_overflow"] == math.inf
        assert found["lr"][0] > found["lr"][1] > found["lr"][2]
        assert rank["overflow"][0]["metrics"]["seen/log_probs_dtype"] == ["torch.float32"] * 2


def test_without_our_config_the_engine_is_verls_bit_for_bit(seen):
    """Log-probs, parameters after three steps (one of them poisoned), metrics and learning rates."""
    for rank in seen:
        assert rank["upstream"]["same"] == [True, True, True]
        assert rank["upstream"]["scaler"] == "ShardedGradScaler"


def test_critic_scales_and_bf16_needs_no_scaler(seen):
    for rank in seen:
        found = rank["others"]
        assert found["critic_class"] == "FSDPEngineWithValueHeadOnCPU"
        assert found["critic"]["changed"] and found["critic"]["metrics"]["precision/loss_scale"] == [1024]
        good, bad = found["bf16"]
        assert good["scale"] is None and good["metrics"]["precision/skipped_steps"] == [0]
        assert good["metrics"]["seen/log_probs_dtype"] == ["torch.float32"] * 2
        assert not bad["changed"] and bad["lr"] == good["lr"] and bad["metrics"]["precision/skipped_steps"] == [1]
        assert "precision/loss_scale" not in good["metrics"]


def test_ratio_source_shadow_gives_the_shadows_value_and_the_training_gradient(seen):
    """FP32 training, BF16 shadow: infer is bit for bit a BF16 engine's, before and after an update."""
    for rank in seen:
        found = rank["shadow"]
        assert found["beta"] > 1e-4, "the two precisions differ, or this test shows nothing"
        assert found["changed"] and found["same"] == [True, True]
        for with_shadow, without in found["gradient_error"]:
            assert with_shadow < 1e-6, "exp(α)·∇log π_train"
            assert without > 1e-4, "exp(α + β)·∇log π_train"


def test_forward_in_another_dtype_stops_the_run(seen):
    for rank in seen:
        found = rank["contradiction"]
        assert found["error"] == "PrecisionContradictionError"
        assert "param_dtype='bfloat16'" in found["message"] and "actor" in found["message"]
        assert "model.layers.0.self_attn.q_proj: float16" in found["message"]


def test_output_head_in_fp32(seen):
    for rank in seen:
        assert rank["head"]["False"]["logits"] == ["torch.float16"]
        assert rank["head"]["True"]["logits"] == ["torch.float32"]
        assert rank["head"]["True"]["error"] < 1.1 * rank["head"]["False"]["error"]


def test_export_says_the_dtype_it_was_trained_in(seen):
    """Trap 3.16: the weights are FP32, and verl's config.json tells every loader to round them to BF16."""
    for rank in seen:
        assert rank["export"]["ours"] == {"config": "float16", "weights": ["F32"]}
        assert rank["export"]["theirs"] == {"config": "bfloat16", "weights": ["F32"]}


def test_merged_lora_is_sent_as_exact_as_it_is(seen):
    """Trap 3.15: verl rounds base + scale·B·A to BF16."""
    for rank in seen:
        ours, theirs = rank["merged_lora"]["ours"], rank["merged_lora"]["theirs"]
        assert ours["dtypes"] == ["torch.float32"] and ours["relative_error"] < 1e-6
        assert theirs["dtypes"] == ["torch.bfloat16"] and theirs["relative_error"] > 1e-3
        assert ours["restored"] and theirs["restored"]
