"""What the jobs that draw or score share: options, prompts and problems, reward, journal, frame and loop."""
