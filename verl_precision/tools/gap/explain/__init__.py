"""Which cause makes a gap between rollout and trainer (`verl-precision explain`; docs/explain.md has the path)."""
