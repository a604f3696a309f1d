"""vLLM that samples and verl's engine that scores, each in a process of its own."""
