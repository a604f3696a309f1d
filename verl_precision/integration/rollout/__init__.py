"""What vLLM's processes run of this package: the guard of weight syncs, sampling masks, an agent loop."""
