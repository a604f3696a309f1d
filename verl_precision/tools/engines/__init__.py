"""vLLM samples and verl's engine scores, each in its own process."""
