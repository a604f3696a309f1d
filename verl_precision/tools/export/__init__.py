"""`verl-precision export`: what the ranks saved (shards), as a Hugging Face folder (session)."""
