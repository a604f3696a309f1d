"""The training-inference mismatch without training (`verl-precision mismatch`; arXiv 2510.26788, section 3.5)."""
