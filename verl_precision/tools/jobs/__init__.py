"""The parts of every job that samples or scores: options, prompts, problems, rewards, the journal, the task loop."""
