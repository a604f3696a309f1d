"""This package's engines for verl: build, losses, measurement, export of weights."""
