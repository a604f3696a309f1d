"""The causes of a gap between rollout and trainer (`verl-precision explain`; docs/gap.md shows the steps)."""
