"""Features that most runs do not use: a package for each group of verbs, and the packages they share."""
