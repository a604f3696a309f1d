"""One-word edits of the recipes that break a run, or that verl changes without a word; and edits that it survives.

Each row is an edit that was tried. It shows both sides: `check`'s rule on the config alone, and what verl, or vLLM,
would have done, by their own code in this process. Where only a GPU could show it, the row names a line. Paths are of
site-packages: verl 0.9.1 and vLLM 0.28.0.
"""

import math
import os
import re
from types import SimpleNamespace
from typing import get_args

import numpy
import pytest
import torch
from composer import ROOT, compose_recipe
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_kl_controller, kl_penalty
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import hf_tokenizer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tracking import Tracking
from verl.workers.config.optimizer import build_optimizer
from verl.workers.rollout.base import get_rollout_class
from verl_says import objection

from verl_precision.base.tiny_model import cached_tiny_model
from verl_precision.base.verl_config import engines
from verl_precision.check.probe import model_config, probe_environment
from verl_precision.check.rules.layout import VLLM_DTYPES, VLLM_LORA_RANK
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import RULES, Environment
from verl_precision.check.verl_refusals import refusals

# Rule, how serious, recipe, scale, edit, and who shows that it is right:
#   verl: MESSAGE     `verl_says.objection` raises it
#   vllm: MESSAGE     vLLM's `EngineArgs` refuses it
#   by reading: LINE  only a run could show it
#   NAME              `witness_NAME`, or an entry of `WITNESSES`, below
#   nobody            needs to be asked
EDITS = """
token-budget-too-small E sanity 1x8_a100 actor.ppo_max_token_len_per_gpu=4000 | verl: max_token_len must be greater
token-budget-too-small  E sanity      1x8_h100 rollout.log_prob_max_token_len_per_gpu=4000 estimator=grpo \
    | verl: must be greater
token-budget-too-small  E dense_14b   8x8_h100 actor.use_kl_loss=True ref.log_prob_max_token_len_per_gpu=4000 \
    | by reading: verl/utils/seqlen_balancing.py:407
memory-training         E sanity      1x8_a100 actor.ppo_max_token_len_per_gpu=160000   | arithmetic
memory-training         E dense_14b   8x8_h100 model.enable_gradient_checkpointing=False | arithmetic
memory-training         E moe         2x8_h100 trainer.nnodes=1                         | arithmetic
memory-training         E moe 8x8_h100 fsdp.use_no_sync_for_gradient_accumulation=True  | arithmetic
router-replay-memory    W moe         2x8_h100 +router_replay=rollout                   | arithmetic
memory-rollout          E moe         8x8_h100 rollout.tensor_model_parallel_size=1     | arithmetic
memory-rollout          E dense_14b   1x8_h100 rollout.gpu_memory_utilization=0.2       | arithmetic
memory-rollout          W sanity      1x8_a100 rollout.gpu_memory_utilization=0.95      | arithmetic
gpus-do-not-divide      E sanity      1x8_a100 rollout.tensor_model_parallel_size=3     | verl: 8 is not divisible by 3
gpus-do-not-divide      E dense_14b   2x8_h100 trainer.n_gpus_per_node=5 rollout.tensor_model_parallel_size=4 \
    | verl: 10 is not divisible by 4
gpus-do-not-divide      E sanity      1x8_a100 actor.ulysses_sequence_parallel_size=3   | left_over
gpus-do-not-divide      E moe         8x8_h100 fsdp.fsdp_size=6                         | left_over
heads-do-not-divide E sanity 1x8_a100 rollout.tensor_model_parallel_size=8 | vllm: attention heads .12. must be div
heads-do-not-divide     E sanity      1x8_a100 actor.ulysses_sequence_parallel_size=8   | monkey_patch
heads-do-not-divide     E lora        1x8_h100 trainer.n_gpus_per_node=6 rollout.tensor_model_parallel_size=3 \
    | by reading: vllm/model_executor/models/qwen2.py:129
batch-does-not-divide   E sanity      1x8_a100 trainer.n_gpus_per_node=6                | verl: Got mini_batch_size=128
batch-does-not-divide   E lora        1x8_h100 actor.ppo_mini_batch_size=1 rollout.n=6  | verl: Got mini_batch_size=6
batch-does-not-divide   E quickstart  cpu      actor.use_dynamic_bsz=False actor.ppo_micro_batch_size_per_gpu=7 \
    | verl: divisible
batch-does-not-divide   E sanity      1x8_a100 rollout.log_prob_use_dynamic_bsz=False   | verl: workers: Assert
batch-is-padded         W sanity      1x8_a100 data.train_batch_size=63                 | padded
batch-is-padded         W sanity      1x8_a100 actor.ppo_mini_batch_size=128            | padded
batch-is-padded         W octothinker 1x8_h100 actor.ppo_mini_batch_size=12             | padded
vllm-refuses-setting    E sanity      1x8_a100 rollout.dtype=fp16                       | vllm: Input should be 'auto'
vllm-refuses-setting    E moe         8x8_h100 rollout.dtype=torch.float16              | vllm: Input should be 'auto'
vllm-refuses-setting E sanity cpu rollout.max_num_batched_tokens=128 | vllm: greater than or equal to max_num_s
vllm-refuses-setting    E lora        1x8_h100 rollout.gpu_memory_utilization=1.2       | vllm: less than or equal to 1
vllm-refuses-setting    E lora        1x8_h100 rollout.max_model_len=8192               | context
vllm-refuses-setting    E lora        1x8_h100 model.lora_rank=1024 | verl: must be less than or equal to 512
value-out-of-range      E sanity      1x8_a100 rollout.temperature=0 | verl: temperature should be greater than 0
value-out-of-range      E sanity      1x8_a100 rollout.n=0                              | verl: .
value-out-of-range      E sanity      1x8_a100 trainer.n_gpus_per_node=0                | verl: .
nothing-trained         E sanity      1x8_a100 trainer.total_training_steps=0           | verl: by reading
nothing-trained         E sanity      1x8_a100 trainer.val_only=True trainer.val_before_train=False \
    | by reading: verl/trainer/ppo/v1/trainer_base.py:437
group-of-one            W octothinker 1x8_h100 rollout.n=1                              | bare_reward
group-of-one            W dense_14b   8x8_h100 rollout.n=1                              | bare_reward
resume-refused          E sanity      1x8_a100 trainer.resume_mode=resume_path          | resume
resume-refused          E sanity      1x8_a100 trainer.resume_mode=never                | resume
verl-refuses            E sanity      1x8_a100 algorithm.adv_estimator=grop | verl: Unknown advantage estimator
verl-refuses            E sanity      1x8_a100 actor.policy_loss.loss_mode=gropo        | verl: Unsupported loss mode
verl-refuses            E sanity      1x8_a100 reward.reward_manager.name=naiv          | verl: Unknown reward manager
verl-refuses            E sanity      1x8_a100 rollout.name=vlm                         | rollout_registry
verl-refuses            E sanity      1x8_a100 rollout.pipeline_model_parallel_size=2   | verl: not implemented
verl-refuses            E moe         8x8_h100 rollout.expert_parallel_size=3 | verl: expert_parallel_size must be equal
verl-refuses            E sanity      1x8_a100 trainer.logger=wandbb                    | verl: wandbb is not supported
verl-refuses            E sanity      1x8_a100 trainer.v1.trainer_mode=synk             | verl: Unknown trainer
verl-refuses            E sanity      1x8_a100 fsdp.mixed_precision.param_dtype=fp61    | verl: fp61
verl-refuses            E sanity      1x8_a100 actor.loss_agg_mode=token-meen           | verl: Invalid loss_agg_mode
verl-refuses            E sanity      1x8_a100 actor.use_dynamic_bsz=False | verl: Please set at least one of
verl-refuses            E sanity      1x8_a100 actor.optim.lr=abc                       | verl: not supported between
verl-refuses            E sanity      1x8_a100 actor.optim.lr=-1e-6                     | verl: Invalid learning rate
verl-refuses            E sanity      1x8_a100 actor.optim.optimizer=Adan               | verl: has no attribute 'Adan'
verl-refuses            E sanity      1x8_a100 actor.optim.lr_scheduler_type=linear     | verl: AssertionError
attention-refuses-fp32  E sanity 1x8_a100 precision=fp32 model.override_config.attn_implementation=flash_attention_2 \
    | by reading: flash_attn/flash_attn_interface.py, "only support fp16 and bf16"
data-format-unknown     E sanity      1x8_a100 data.val_files=null                      | dataset
data-format-unknown     E quickstart  cpu      data.train_files=recipes/quickstart/reward.py | dataset
reward-function-missing E quickstart  cpu      reward.custom_reward_function.name=score | reward
batch-exceeds-data      E quickstart  cpu      data.train_batch_size=512                | steps_per_epoch
epochs-end-first        W quickstart  cpu      trainer.total_training_steps=100 trainer.total_epochs=2 \
    | by reading: verl/trainer/ppo/v1/trainer_base.py:467
folder-not-writable E quickstart cpu trainer.save_freq=5 trainer.default_local_dir=README.md/checkpoints | folder
package-not-installed   E quickstart  cpu      trainer.logger=clearml                   | logger
model-missing E quickstart cpu algorithm.adv_estimator=gae critic.model.path=no/such/folder/here | critic
value-unusual           W sanity      1x8_a100 actor.optim.lr=1e6                       | nobody
value-unusual           W lora        1x8_h100 actor.optim.lr=4e-15                     | nobody
value-unusual           W moe         8x8_h100 actor.clip_ratio_high=28                 | nobody
value-unusual           W moe         8x8_h100 actor.loss_scale_factor=20               | nobody
value-unusual           W dense_14b   8x8_h100 actor.clip_ratio_c=1000                  | nobody
value-unusual           W dense_14b   8x8_h100 actor.optim.weight_decay=10              | nobody
value-unusual   W dense_14b 8x8_h100 actor.optim.override_optimizer_config.eps=1        | nobody
value-unusual           W sanity      1x8_a100 actor.entropy_coeff=5                    | nobody
value-unusual           W sanity      1x8_a100 actor.optim.clip_grad=1e-6               | nobody
value-unusual           W sanity      1x8_a100 actor.ppo_epochs=100                     | nobody
value-unusual           W sanity      1x8_a100 rollout.temperature=0.01                 | nobody
value-unusual           W octothinker 1x8_h100 data.train_batch_size=1280000            | nobody
value-unusual W dense_14b 8x8_h100 reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=100 | nobody
value-out-of-range      E sanity      1x8_a100 rollout.temperature=10                   | sampling
value-out-of-range      E sanity      1x8_a100 rollout.top_p=0                          | sampling
value-out-of-range      E moe         2x8_h100 rollout.top_p=95                         | sampling
value-out-of-range      E sanity      1x8_a100 rollout.top_k=-5                         | sampling
value-out-of-range      E sanity      1x8_a100 rollout.val_kwargs.top_p=95              | sampling
value-out-of-range      E sanity      1x8_a100 rollout.val_kwargs.temperature=-1        | sampling
value-out-of-range      E sanity      1x8_a100 rollout.val_kwargs.n=0 | by reading: verl/trainer/ppo/v1/trainer_base.py
value-out-of-range      E sanity      1x8_a100 rollout.checkpoint_engine.update_weights_bucket_megabytes=0 \
    | by reading: verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py:140
value-out-of-range      E dense_14b   8x8_h100 actor.clip_ratio_c=0.5 \
    | by reading: verl/trainer/ppo/core_algos.py:1331
value-out-of-range      E dense_14b   8x8_h100 algorithm.filter_groups.max_inflight_gen_batches=0 | replay_buffer
value-out-of-range      E sanity      1x8_a100 trainer.v1.sampler.max_off_policy_threshold=0 | replay_buffer
value-out-of-range      E quickstart  cpu      data.dataloader_num_workers=-1           | loader
value-out-of-range      E sanity      1x8_a100 reward.num_workers=0 | by reading: verl/experimental/reward_loop
name-unknown E sanity 1x8_a100 rollout.scheduling_policy=lifo | by reading: vllm/config/scheduler.py, SchedulerPolicy
name-unknown            E sanity      1x8_a100 actor.use_kl_loss=True actor.kl_loss_type=k4               | kl
name-unknown            E sanity      1x8_a100 algorithm.use_kl_in_reward=True algorithm.kl_penalty=k9    | kl
name-unknown            E sanity      1x8_a100 algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=fix | kl
name-unknown            E sanity      1x8_a100 actor.checkpoint.save_contents=[model,optimiser,extra] \
    | by reading: verl/utils/checkpoint/checkpoint_manager.py:83
name-unknown            E moe         8x8_h100 algorithm.rollout_correction.rollout_is=tokn \
    | by reading: verl/trainer/ppo/rollout_corr_helper.py:565
name-unknown            E moe         8x8_h100 algorithm.rollout_correction.rollout_rs=seq_k1 \
    | by reading: verl/trainer/ppo/rollout_corr_helper.py:252
name-unknown            E sanity      1x8_a100 +model.override_config.attn_implementation=flash_attn2 \
    | by reading: transformers/modeling_utils.py:2006
name-unknown            E sanity      1x8_a100 trainer.v1.sampler.max_off_policy_strategy=skip | replay_buffer
name-unknown E sanity 1x8_a100 reward.reward_manager.source=registry | by reading: verl/trainer/ppo/reward.py:107
name-unknown            E lora        1x8_h100 model.target_modules=all_linear          | peft
name-unknown            E lora        1x8_h100 model.target_modules=[linear_qkv,linear_proj] | peft
name-unknown            E lora        1x8_h100 model.target_modules=[q_prj,v_proj] \
    | by reading: peft/tuners/tuners_utils.py:1100
name-unknown            W sanity      1x8_a100 rollout.agent.default_agent_loop=single_turn \
    | by reading: verl/experimental/agent_loop/agent_loop.py:678
lengths-differ          E sanity      1x8_a100 rollout.response_length=1024 \
    | by reading: verl/experimental/agent_loop/single_turn_agent_loop.py:96
lengths-differ          E sanity      1x8_a100 rollout.response_length=16000 \
    | by reading: verl/workers/rollout/vllm_rollout/vllm_async_server.py:612
lengths-differ E moe 2x8_h100 rollout.prompt_length=256 | by reading: verl/experimental/agent_loop/agent_loop.py:438
context-too-small       E sanity      1x8_a100 +rollout.engine_kwargs.vllm.max_model_len=4096 \
    | by reading: verl/workers/rollout/vllm_rollout/vllm_async_server.py:593
vllm-refuses-setting    E dense_14b   8x8_h100 rollout.max_model_len=40960              | context
vllm-refuses-setting    E moe         2x8_h100 rollout.n=16 data.max_response_length=40000 | context
nothing-trained         E sanity      1x8_a100 actor.optim.clip_grad=0                  | no_gradient
nothing-trained         E moe         2x8_h100 +actor.optim.grad_clip=0                 | no_gradient
nothing-trained E sanity 1x8_a100 actor.optim.clip_grad=null \
    | by reading: verl/workers/engine/fsdp/transformer_impl.py:795
nothing-trained         E lora        1x8_h100 model.lora_alpha=0 | by reading: peft/tuners/lora/layer.py, scaling
nothing-trained E sanity 1x8_a100 trainer.critic_warmup=2000 | by reading: verl/trainer/ppo/v1/trainer_base.py:608
nothing-trained E dense_14b 8x8_h100 trainer.total_epochs=0 | by reading: verl/trainer/ppo/v1/trainer_base.py:467
trains-little           W sanity      1x8_a100 actor.optim.lr=0                         | nobody
trains-little W sanity 1x8_a100 trainer.critic_warmup=20 | by reading: verl/trainer/ppo/v1/trainer_base.py:608
trains-little           W sanity      1x8_a100 actor.optim.lr_warmup_steps=5000 \
    | by reading: verl/workers/engine/fsdp/transformer_impl.py:522
trains-little           W dense_14b   8x8_h100 actor.optim.lr_warmup_steps=-1 actor.optim.lr_warmup_steps_ratio=1.5 \
    | by reading: verl/workers/engine/fsdp/transformer_impl.py:516
trains-little           W sanity      1x8_a100 actor.use_kl_loss=True actor.kl_loss_coef=0 | nobody
trains-little           W sanity      1x8_a100 rollout.ignore_eos=True \
    | by reading: verl/workers/rollout/vllm_rollout/vllm_async_server.py:624
setting-ignored W moe 8x8_h100 actor.clip_ratio=0.1 | by reading: verl/trainer/ppo/core_algos.py:1321
setting-ignored         W lora        1x8_h100 model.lora_rank=0 \
    | by reading: verl/workers/engine/fsdp/transformer_impl.py:162
setting-ignored W dense_14b 8x8_h100 actor.loss_scale_factor=20480 | by reading: verl/trainer/ppo/core_algos.py:1190
setting-ignored         W sanity      1x8_a100 actor.kl_loss_coef=0.1  | by reading: verl/workers/utils/losses.py
setting-ignored         W sanity      1x8_a100 actor.optim.min_lr_ratio=0.1 \
    | by reading: verl/workers/engine/fsdp/transformer_impl.py:522
setting-ignored W sanity 1x8_a100 +rollout.repetition_penalty=1.2 \
    | by reading: verl/experimental/agent_loop/agent_loop.py:594
setting-ignored W sanity 1x8_a100 rollout.do_sample=False | by reading: verl/experimental/agent_loop/agent_loop.py:590
setting-ignored         W sanity      1x8_a100 data.reward_fn_key=source \
    | by reading: verl/experimental/reward_loop/reward_manager/naive.py:42
setting-ignored         W dense_14b   8x8_h100 trainer.v1.sampler.custom_sampler.path=mine.py \
    | by reading: verl/trainer/ppo/v1/trainer_base.py:164
progress-not-kept W moe 8x8_h100 trainer.save_freq=-1 checkpoint.every_minutes=0 \
    | by reading: verl/trainer/ppo/v1/trainer_base.py
progress-not-kept W sanity 1x8_a100 trainer.save_freq=0 checkpoint.every_minutes=0 \
    | by reading: verl/trainer/ppo/v1/trainer_base.py
progress-not-kept       W dense_14b   8x8_h100 trainer.save_freq=100 checkpoint.every_minutes=0 \
    | by reading: verl/trainer/ppo/v1/trainer_base.py
progress-not-kept       W sanity      1x8_a100 trainer.resume_mode=disable \
    | by reading: verl/trainer/ppo/v1/trainer_base.py:854
progress-not-kept       W sanity      1x8_a100 trainer.del_local_ckpt_after_load=True \
    | by reading: verl/trainer/ppo/v1/trainer_base.py:882
progress-not-kept       W moe         2x8_h100 trainer.default_local_dir=/tmp/checkpoints     | nobody
progress-not-kept       W sanity      1x8_a100 trainer.default_local_dir=/dev/shm/checkpoints | nobody
progress-not-kept       W sanity      1x8_a100 actor.checkpoint.save_contents=[optimizer,extra] \
    | by reading: verl/utils/checkpoint/checkpoint_manager.py:72
progress-not-kept       W sanity      1x8_a100 actor.checkpoint.load_contents=[model] \
    | by reading: verl/utils/checkpoint/checkpoint_manager.py:124
progress-not-kept       W sanity      1x8_a100 trainer.logger=[] | by reading: verl/utils/tracking.py
model-overridden        E sanity      1x8_a100 +model.override_config.num_hidden_layers=14 \
    | by reading: verl/workers/rollout/vllm_rollout/vllm_async_server.py:1212
overlong-buffer         E dense_14b   8x8_h100 reward.reward_kwargs.overlong_buffer_cfg.len=0     | dapo_rewards
overlong-buffer         E dense_14b   8x8_h100 reward.reward_kwargs.overlong_buffer_cfg.len=30000 | dapo_rewards
overlong-buffer         E dense_14b   8x8_h100 reward.reward_kwargs.max_resp_len=null             | dapo_rewards
overlong-buffer         E dense_14b   8x8_h100 reward.reward_kwargs.max_resp_len=4096 \
    | by reading: verl/experimental/reward_loop/reward_manager/dapo.py
overlong-buffer         E dense_14b   8x8_h100 reward.reward_manager.name=naive \
    | by reading: verl/experimental/reward_loop/reward_manager/naive.py
filter-metric           E dense_14b   8x8_h100 algorithm.filter_groups.metric=accuracy \
    | by reading: verl/trainer/ppo/v1/replay_buffer.py:304
filter-metric           E dense_14b   8x8_h100 algorithm.filter_groups.metric=null      | replay_buffer
filter-metric           W dense_14b   cpu      algorithm.filter_groups.metric=accuracy \
    | by reading: verl/trainer/ppo/v1/replay_buffer.py:304
chat-template-missing   W octothinker 1x8_h100 model.custom_chat_template=null \
    | by reading: verl/utils/dataset/rl_dataset.py:259
reward-function-missing E sanity      1x8_a100 \
    reward.custom_reward_function.path=pkg://verl_precision.integration.rewards.boxed_answr | reward_module
reward-function-missing E sanity      1x8_a100 reward.custom_reward_function.name=compute_scores | reward_module
package-not-installed   E sanity      1x8_a100 rollout.name=sglang                      | package
package-not-installed   E sanity      1x8_a100 actor.optim.optimizer_impl=bitsandbytes.optim | package
column-missing          E quickstart  cpu      data.prompt_key=question                 | column
"""
# Edits that verl survives, each tried alone on the recipe and scale of its line: no error may be raised.
SURVIVED = """
sanity      1x8_a100 precision=fp32 rollout.n=4 rollout.tensor_model_parallel_size=4 rollout.dtype=half
sanity      1x8_a100 actor.ulysses_sequence_parallel_size=2 actor.ppo_max_token_len_per_gpu=32000 actor.optim.lr=0
sanity      1x8_a100 actor.strategy=fsdp fsdp.fsdp_size=4 data.train_batch_size=60 trainer.resume_mode=disable
sanity      2x8_h100 actor.use_kl_loss=True
sanity      cpu      actor.ppo_max_token_len_per_gpu=112
moe         8x8_h100 rollout.tensor_model_parallel_size=8
dense_14b   8x8_h100 rollout.enable_chunked_prefill=False trainer.n_gpus_per_node=4
lora        1x8_h100 model.lora_rank=24 rollout.gpu_memory_utilization=0.7
octothinker 1x8_h100 trainer.total_training_steps=1 trainer.logger=tensorboard
quickstart  cpu      rollout.n=2
"""
ROWS = [
    (*head.split(maxsplit=4), witness.strip())
    for head, _, witness in (line.rpartition("|") for line in EDITS.replace("\\\n", "").splitlines() if line)
]
ids = {"ids": lambda row: "-".join([row[0], row[2], row[4].split()[0]])}


@pytest.fixture(autouse=True)
def _at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def composed(recipe: str, scale: str, edit: str):
    """Compose a recipe with an edit in a short form."""
    text = re.sub(r"(?<!\S)(\+?)fsdp\.", r"\1actor.fsdp_config.", edit)
    text = re.sub(r"(?<!\S)(\+?)(actor|rollout|ref|model)\.", r"\1actor_rollout_ref.\2.", text)
    path = f"recipes/{recipe}/{recipe}.yaml"
    return compose_recipe(path, f"scale={scale}", *text.split(), return_hydra_config=True)


def environment(name: str, config) -> Environment:
    """Look only where the rule asks: the whole takes longer."""
    if any(rule.name == name and rule.of_machine for rule in RULES):
        return probe_environment(config)
    return Environment(model=model_config(config), refusals=refusals(config) if name == "verl-refuses" else ())


@pytest.mark.parametrize("row", ROWS, **ids)
def test_check_finds_the_edit(row):
    name, severity, recipe, scale, edit, _ = row
    config = composed(recipe, scale, edit)
    faults = [fault for fault in find_faults(config, environment(name, config)) if fault.name == name]
    assert faults, "no fault"
    assert {fault.severity[0].upper() for fault in faults} == {severity}
    changed = edit.split()[-1].partition("=")[0].lstrip("+").replace("fsdp.", "fsdp_config.")
    for fault in faults:
        assert fault.allowed and fault.remedy and fault.problem.endswith(".")
    exact = {"verl-refuses", "vllm-refuses-setting", "gpus-do-not-divide", "token-budget-too-small", "name-unknown"}
    exact |= {"value-unusual", "lengths-differ", "trains-little", "progress-not-kept", "filter-metric"}
    if name in exact:
        assert any(fault.setting.endswith(changed) for fault in faults) or " " in edit or "batch" in str(faults), faults


@pytest.mark.parametrize("row", [row for row in ROWS if row[-1].startswith("verl: ")], **ids)
def test_verl_would_have_refused_it(row):
    *_, recipe, scale, edit, witness = row
    assert re.search(witness.removeprefix("verl: "), objection(composed(recipe, scale, edit)))


@pytest.mark.parametrize(("recipe", "scale", "edit"), [
    (recipe, scale, edit) for recipe, scale, *edits in map(str.split, SURVIVED.splitlines()[1:]) for edit in edits
])  # fmt: skip
def test_what_verl_survives_raises_no_error(recipe, scale, edit):
    config = composed(recipe, scale, edit)
    found = find_faults(config, probe_environment(config), this_machine=False)
    assert [str(fault) for fault in found if fault.severity == "error"] == [] and objection(config) == ""


def test_each_row_has_a_witness():
    words = {row[-1] for row in ROWS if not row[-1].startswith(("verl: ", "vllm: ", "by reading: ", "nobody"))}
    assert words == set(WITNESSES)
    assert len(ROWS) >= 28


@pytest.mark.parametrize("row", [row for row in ROWS if ":" not in row[-1] and row[-1] != "nobody"], **ids)
def test_the_witness_agrees(row):
    *_, recipe, scale, edit, witness = row
    WITNESSES[witness](composed(recipe, scale, edit))


def witness_arithmetic(config) -> None:
    """By arithmetic only: tests/check/rules/test_gpu_memory.py has the functions, by hand."""
    assert config.trainer.device == "cuda"


def witness_padded(config) -> None:
    trainer = SimpleNamespace(config=config, use_critic=False, global_steps=1)
    multiple = PPOTrainer._get_required_batch_multiple(trainer, config.trainer.n_gpus_per_node)
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n % multiple
    assert objection(config) == "", "it is padded, and nothing else is said"


def witness_left_over(config) -> None:
    """The mesh that verl asks for leaves ranks out."""
    gpus, engine = config.trainer.nnodes * config.trainer.n_gpus_per_node, engines(config)[0]
    size = max(engine.ulysses[1], engine.node.fsdp_size)
    assert (gpus // size) * size < gpus  # create_device_mesh: (world_size // fsdp_size, fsdp_size)


def witness_monkey_patch(config) -> None:
    from verl.models.transformers.monkey_patch import apply_monkey_patch

    _, size = engines(config)[0].ulysses
    model = type("Model", (), {"config": SimpleNamespace(**model_config(config))})()
    with pytest.raises(AssertionError, match="num_attention_heads 12 must be divisible by ulysses_sp_size 8"):
        apply_monkey_patch(model, ulysses_sp_size=size)


def witness_context(config) -> None:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    described = SimpleNamespace(hf_config=SimpleNamespace(**model_config(config)))
    server = SimpleNamespace(config=config.actor_rollout_ref.rollout, model_config=described)
    with pytest.raises(ValueError, match="less than or equal to max_position_embeddings"):
        vLLMHttpServer._validate_configs(server)


def witness_bare_reward(config) -> None:
    reward, mask = torch.tensor([[0.0, 0.7]]), torch.ones(1, 2)
    estimate = get_adv_estimator_fn(config.algorithm.adv_estimator)
    advantages, _ = estimate(token_level_rewards=reward, response_mask=mask, index=numpy.array(["a"]))
    assert torch.allclose(advantages, 0.7 * mask, atol=1e-5)


def witness_dataset(config) -> None:
    files = config.data.val_files if config.data.val_files is None else config.data.train_files
    with pytest.raises((AttributeError, TypeError, ValueError)):
        RLHFDataset(files, None, config.data)


def witness_steps_per_epoch(config) -> None:
    tokenizer = hf_tokenizer(str(cached_tiny_model("qwen3")))
    given = {"tokenizer": tokenizer, "processor": None, "trainer_mode": "sync", "parameter_sync_step": 1}
    trainer = SimpleNamespace(config=config, **given)
    PPOTrainer._init_dataloader(trainer)
    assert trainer.steps_per_epoch == 0, "PPOTrainer.fit divides by it"


def witness_loader(config) -> None:
    with pytest.raises(ValueError, match="num_workers"):
        StatefulDataLoader([1], num_workers=config.data.dataloader_num_workers)


def witness_column(config) -> None:
    data = RLHFDataset(config.data.train_files, hf_tokenizer(str(cached_tiny_model("qwen3"))), config.data)
    with pytest.raises(KeyError, match="question"):
        data[0]


def witness_sampling(config) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    rollout = config.actor_rollout_ref.rollout
    with pytest.raises(VLLMValidationError):
        for asked in (rollout, rollout.val_kwargs):
            SamplingParams(temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k)


def witness_replay_buffer(config) -> None:
    trainer = SimpleNamespace(config=config, trainer_mode="sync", _add_prompts_to_generate=print)
    trainer._resolve_filter_groups_metric = lambda: PPOTrainer._resolve_filter_groups_metric(trainer)
    with pytest.raises((AssertionError, ValueError), match="off policy|max_inflight_gen_batches|must be set"):
        PPOTrainer._build_replay_buffer(trainer)


def witness_kl(config) -> None:
    zero = torch.zeros(1)
    with pytest.raises(NotImplementedError):
        get_kl_controller(config.algorithm.kl_ctrl)
        kl_penalty(zero, zero, config.algorithm.kl_penalty)
        kl_penalty(zero, zero, config.actor_rollout_ref.actor.kl_loss_type)


def witness_peft(config) -> None:
    model, targets = AutoModelForCausalLM.from_pretrained(cached_tiny_model("qwen2")), config.actor_rollout_ref.model
    targets = OmegaConf.to_container(targets).get("target_modules")
    with pytest.raises(ValueError, match="not found in the base model"):
        get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=targets))


def witness_no_gradient(config) -> None:
    """FSDPEngine.optimizer_step, without its ranks."""
    optim, parameter = omega_conf_to_dataclass(config.actor_rollout_ref.actor.optim), torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.nn.utils.clip_grad_norm_([parameter], optim.clip_grad)
    assert parameter.grad.tolist() == [0.0, 0.0]


def witness_package(config) -> None:
    rollout, optim = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.optim
    with pytest.raises(ImportError):
        build_optimizer([torch.nn.Parameter(torch.zeros(1))], omega_conf_to_dataclass(optim))
        get_rollout_class(rollout.name, rollout.mode)


def witness_critic(config) -> None:
    OmegaConf.resolve(config.critic)
    with pytest.raises(Exception, match="no/such/folder/here"):
        omega_conf_to_dataclass(config.critic.model)


WITNESSES = {name.removeprefix("witness_"): value for name, value in globals().items() if name.startswith("witness_")}
WITNESSES |= {  # a call that raises
    "folder": lambda config: pytest.raises(NotADirectoryError, os.makedirs, config.trainer.default_local_dir),
    "logger": lambda config: pytest.raises(ImportError, Tracking, "", "", config.trainer.logger).match("clearml"),
    "resume": lambda config: pytest.raises(
        (AssertionError, UnboundLocalError), PPOTrainer._load_checkpoint, SimpleNamespace(config=config)
    ),
    "dapo_rewards": lambda config: pytest.raises(AssertionError, DAPORewardManager, config, None, len),
    "reward_module": lambda config: pytest.raises((AttributeError, ModuleNotFoundError), get_custom_reward_fn, config),
    "reward": lambda config: pytest.raises(AttributeError, get_custom_reward_fn, config).match("score"),
    "rollout_registry": lambda config: pytest.raises(
        AssertionError, get_rollout_class, config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.rollout.mode
    ).match("Rollout vlm with mode async not found"),
}


def test_vllm_would_have_refused_it():
    """One test, since vLLM's import takes seconds."""
    from vllm.config.lora import MaxLoRARanks
    from vllm.config.model import ModelDType
    from vllm.engine.arg_utils import EngineArgs

    same = ("dtype", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
    keys = ("num_attention_heads", "num_key_value_heads")

    def asked(rollout, heads: dict):
        settings = {name: rollout[name] for name in same} | {"tensor_parallel_size": rollout.tensor_model_parallel_size}
        tiny = {"model": str(cached_tiny_model("qwen2")), "max_model_len": 256, "hf_overrides": heads}
        return EngineArgs(**tiny, **settings, distributed_executor_backend="mp").create_engine_config()

    for *_, recipe, scale, edit, witness in ROWS:
        if witness.startswith("vllm: "):
            config = composed(recipe, scale, edit)
            with pytest.raises(ValueError, match=witness.removeprefix("vllm: ")):
                asked(config.actor_rollout_ref.rollout, {key: model_config(config)[key] for key in keys})
    config = composed("sanity", "cpu", "rollout.dtype=half")
    assert asked(config.actor_rollout_ref.rollout, {})
    assert set(get_args(ModelDType)) == set(VLLM_DTYPES) and max(get_args(MaxLoRARanks)) == VLLM_LORA_RANK


def test_whole_gradients_are_named_where_they_do_not_fit_and_only_there():
    """4 bytes x 30.5e9 parameters are 114 GiB; the small model's 7 GiB, and one micro-batch a mini-batch, are fine."""
    edit = "fsdp.use_no_sync_for_gradient_accumulation=True"
    config = composed("moe", "8x8_h100", edit)
    (fault,) = find_faults(config, Environment(model=model_config(config)))
    assert fault.name == "memory-training" and fault.setting.endswith("use_no_sync_for_gradient_accumulation")
    assert "114 (whole gradients until the last micro-batch)" in fault.problem and "=False" in fault.remedy
    for recipe, scale, more in (("sanity", "1x8_h100", ""), ("moe", "8x8_h100", " actor.ppo_mini_batch_size=4")):
        config = composed(recipe, scale, edit + more)
        assert not find_faults(config, Environment(model=model_config(config)))


def test_router_replay_is_counted_a_host():
    """768 bytes x 512 x 16 x 22,528 tokens are 142 GB: 18 GB on each of 8 hosts, 71 GB on each of two."""
    config = composed("moe", "8x8_h100", "+router_replay=rollout")
    assert not find_faults(config, Environment(model=model_config(config)))
    config = composed("moe", "2x8_h100", "+router_replay=rollout")
    (fault,) = find_faults(config, Environment(model=model_config(config)))
    assert all(words in fault.problem for words in ("142 GB", "768 bytes a token", "66 GiB"))


def test_a_named_gpu_counts_before_the_scales_own():
    """A larger GPU than the scale's takes a larger micro-batch; the remedy, put in, fits."""
    config = composed("sanity", "1x8_h100", "actor.ppo_max_token_len_per_gpu=160000")
    known = Environment(model=model_config(config))
    (fault,) = [fault for fault in find_faults(config, known) if fault.name == "memory-training"]
    edit = fault.remedy.removeprefix("Set actor_rollout_ref.").removesuffix(".")
    assert not find_faults(composed("sanity", "1x8_h100", edit), known)
    most = int(edit.partition("=")[2])
    more = composed("sanity", "1x8_h100", f"actor.ppo_max_token_len_per_gpu={math.ceil(1.05 * most)}")
    assert [fault.name for fault in find_faults(more, known)] == ["memory-training"]
    assert not find_faults(more, Environment(model=model_config(config), gpus=("NVIDIA H200",)))
