"""verl and vLLM on a CPU: the platform that verl asks, and what vLLM's CPU build needs."""
