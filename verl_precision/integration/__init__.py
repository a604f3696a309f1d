"""The rim: every module that imports verl or vLLM, and what verl loads of this package.

registration.py        what is registered with verl, and at whose import
ledger/                every host symbol that is patched, overridden or used privately: why, how, until when
preflight.py           Hydra's callback: ask every rule before Ray starts
recipe_config.py       compose a recipe as verl does; the table of its dtypes
machine.py             what the rules have to know of this machine, verl and vLLM
resolvers.py           `${verl_precision.*:}` in configs; search_path.py: where Hydra finds the presets
policy_losses.py       the losses under verl's call
rollout_weights.py     equations (9) and (10) in verl's rollout correction
trainers.py            verl's trainers, with the mismatch measured; run_monitor.py: what they do at each step
merged_metrics.py      statistics through verl: merged over micro-batches and ranks, not averaged
histogram_loggers.py   histograms for wandb and TensorBoard
fsdp_engine.py         loss scaling, FP32 log-probs and verified dtypes in verl's FSDP engines
engine_config.py       verl's engine config with our settings
shadow_engine.py       the shadow forward; measurement.py: the mismatch measured in the worker
router_replay.py       the rollout's choice of experts, replayed in the trainer
weight_export.py       weights on their way to the rollout and into an export
weight_sync_worker.py  the end of every weight sync, verified; load_recorder.py: what layers are sent
canary_requests.py     the canary's questions to the rollout replicas and to the trainer
vllm_sampler.py        vLLM draws, for offline jobs; fsdp_scorer.py: verl's engine scores
agent_loop.py          verl's agent loop with stop strings, min-p and sampling masks
repeatable.py          prompts with names of their place; sorted_replay_buffer.py: batches sorted by them
sampling_masks.py      masks on their way to the trainer; vllm_sampling_masks.py: the server that says what was kept
reward.py              verl's reward functions; boxed_answer.py, answer_tag.py: two of the paper's authors
math_answers.py        whether two answers are equal; math_judge.py: the process that asks math-verify
cpu/                   verl and vLLM on a CPU
"""
