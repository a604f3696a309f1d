"""The parts of this package in vLLM's processes: the guard of weight syncs, sampling masks, an agent loop."""
