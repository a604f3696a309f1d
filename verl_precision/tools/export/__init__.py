"""`verl-precision export`: reads the ranks' files (shards), writes a Hugging Face folder and its card (session)."""
