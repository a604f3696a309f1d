"""This package's engines under verl: their build, losses, measurement, and weights on their way out."""
