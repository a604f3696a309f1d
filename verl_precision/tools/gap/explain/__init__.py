"""Which cause makes a gap between rollout and trainer: measured interventions along a path from one to the other."""
