"""The parts of this package in verl's trainer process: measurement, alarm, canary, metrics file, identity of a run."""
