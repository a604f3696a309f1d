"""What verl's trainer process runs of this package: measurement, alarm, canary, metrics file, identity of a run."""
