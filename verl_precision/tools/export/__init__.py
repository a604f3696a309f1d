"""`verl-precision export`: reads the ranks' files, and writes a Hugging Face folder and its card."""
