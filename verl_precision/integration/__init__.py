"""The rim: every module that imports verl or vLLM.

registration  what is registered with verl, and at whose import
ledger        every host symbol that is patched, overridden or used privately (ledger.json): why, how, until when
host_text     what a host module's text defines, for one that is not imported
resolvers     the presets on Hydra's search path, and `${verl_precision.*:}` in configs
trainer/      verl's trainers: the mismatch at every step, alarms, the canary, checkpoints, whose run a folder is
engine/       verl's FSDP engines: precision, losses, router replay, the shadow, weights on their way out
rollout/      vLLM's processes: the guard of weight syncs, sampling masks, the agent loop
rewards/      rewards by the rules of the paper's authors, and math-verify behind them
cpu/          verl and vLLM on a CPU
"""
