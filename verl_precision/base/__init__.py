"""Code that all other packages share: errors, files, settings, versions, mergeable statistics, and the dtypes in a
config of verl."""
