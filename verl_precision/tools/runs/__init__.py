"""Whole runs: start verl once or in several precisions, follow it, and show its results."""
