"""`verl-precision compare`: one recipe in several arms, one folder, one table."""
