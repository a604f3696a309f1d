"""vLLM that samples and verl's engine that scores, each in a process of its own, on this machine or over Ray."""
