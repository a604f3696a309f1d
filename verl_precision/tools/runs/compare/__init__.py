"""One recipe in several arms, one folder, one table (`verl-precision compare`)."""
