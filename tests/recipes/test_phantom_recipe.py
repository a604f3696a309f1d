"""The phantom-clipping stall: its model on the BF16 grid, its prompts, what its arms change, its reader."""

import pytest
import torch
from composer import ROOT, compose_recipe, differing
from omegaconf import OmegaConf

from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.runs.read import read_runs

RECIPE = ROOT / "recipes/phantom_clipping/phantom_clipping.yaml"
ARMS = OmegaConf.to_container(OmegaConf.load(RECIPE).arms)


def test_on_the_grid_each_weight_is_a_bf16_number_and_its_own_off_the_grid(make_task):
    on, off = (dict(make_task.build_model(1, on_grid).named_parameters()) for on_grid in (True, False))
    assert all(weight.dtype is torch.float32 for weight in (*on.values(), *off.values()))
    assert all(torch.equal(on[name], off[name].bfloat16().float()) for name in off)
    moved = sum((on[name] != off[name]).sum() for name in off) / sum(weight.numel() for weight in off.values())
    assert moved > 0.99
    again = dict(make_task.build_model(1, True).named_parameters())
    assert all(torch.equal(weight, again[name]) for name, weight in on.items())
    assert make_task.build_tokenizer()("abco").input_ids == [1, 2, 3, 15], "a token a letter"


def test_writes_the_task_of_each_seed_and_keeps_one_that_is_there(make_task, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["make_task.py", str(tmp_path / "task"), "--seeds", "0", "3"])
    make_task.main()
    assert sorted(path.name for path in (tmp_path / "task").iterdir()) == ["seed_0", "seed_3"]
    data = read_data_set(tmp_path / "task/seed_3/prompts.jsonl")
    assert len(data.problems) == 1024 and {len(each.prompt[0]["content"]) for each in data.problems} == {4}
    written = tmp_path / "task/seed_0/on_grid/model.safetensors"
    before = written.stat().st_mtime_ns
    make_task.main()
    assert written.stat().st_mtime_ns == before
    assert capsys.readouterr().out.split() == 2 * [str(tmp_path / "task" / seed) for seed in ("seed_0", "seed_3")]


def test_all_arms_take_the_ratio_against_the_rollout_with_one_update_a_batch():
    for overrides in ARMS.values():
        config = compose_recipe(RECIPE, *overrides)
        actor = config.actor_rollout_ref.actor
        assert config.algorithm.rollout_correction.bypass_mode is True
        assert actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1
        assert actor.optim.lr == 1e-5 and actor.fsdp_config.shadow.every_n_steps == 1
        if actor.policy_loss.loss_mode == "vp_grpo":
            assert actor.clip_ratio_low == actor.clip_ratio_high == 0.2


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_changes_what_it_says_and_nothing_else(name):
    keys = differing(compose_recipe(RECIPE, *ARMS["clipped"]), compose_recipe(RECIPE, *ARMS[name]))
    found = {key.rpartition(".")[2] for key in keys if ".loss_scale" not in key}  # FP16 alone has one
    named = {"clipped": "", "shadow": "ratio_source", "ratio_one": "loss_mode", "unclipped": "loss_mode"}
    named |= {"off_grid": "initial_weights path served_model_name", "stochastic": "rounding stochastic_rounding_to"}
    allowed = named.get(name, "dtype param_dtype reduce_dtype VERL_PRECISION_ARITHMETIC").split()
    assert found - {"experiment_name", "default_local_dir"} <= set(allowed), found


def test_the_run_script_names_arms_that_are_there():
    script = (ROOT / "recipes/phantom_clipping/run_length_qwen3_cpu.sh").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("ARMS=")]
    assert set(line.partition(":-")[2].partition("}")[0].split()) <= set(ARMS)


def test_the_stall_is_read_where_the_cured_runs_have_half(reader, write_run, tmp_path):
    """A stalled arm, a cured one that reaches half of the gain when its mean does, and a matched one."""

    def write(arm: str, seed: int, rewards: list[float], clipped: float) -> None:
        same = {"phantom/final_token_clip_fraction": clipped, "phantom/phantom_clipped_fraction": clipped}
        write_run(arm, seed, [{"critic/score/mean": reward, **same} for reward in rewards])

    for seed in (0, 1):
        write("clipped", seed, [-8.0] * 30 + [-7.6] * 30, clipped=0.8)
        write("shadow", seed, [-8.0] * 20 + [-3.0] * 40, clipped=0.0)
    write("fp32", 0, [-8.0] * 10 + [-1.0] * 50, clipped=0.0)
    text = reader.tables(read_runs([tmp_path]))
    # mean of nine: -8 + 5 k/9 passes -4 with k = 8 of its nine steps behind step 20
    assert "At step 28 the median of 2 cured runs" in text
    assert "| `clipped` | 0%, 0% |" in text and "| `fp32` | 88% |" in text and "| `shadow` | 56%, 56% |" in text
    assert "| `clipped` | 0 | -8.00 | -7.60 | none | 80% |" in text
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if "| 0 |" in line}
    assert "phantom_clipping 5" in rows["clipped"] and rows["fp32"].endswith("| none |")
