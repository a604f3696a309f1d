"""Which cause makes a gap between rollout and trainer (`verl-precision explain`; docs/gap.md has the path)."""
