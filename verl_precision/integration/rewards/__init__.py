"""Reward functions for verl's `pkg://`: answers in tags or boxes, compared as mathematics, and reasoning_gym's."""
