"""What the jobs that draw or score share: options, prompts, problems and rewards, the journal, and the loop."""
