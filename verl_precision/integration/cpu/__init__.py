"""verl and vLLM on a CPU: a platform for verl, and additions to vLLM's CPU build."""
