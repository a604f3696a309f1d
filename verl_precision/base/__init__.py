"""Code that all other packages share: errors, loggers, files, settings, versions, mergeable statistics, and the dtypes
in a config of verl."""
