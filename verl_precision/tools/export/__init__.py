"""`verl-precision export`: what the ranks saved (shards), as a Hugging Face folder with its model card (session)."""
