"""Shared by all other packages: errors, files, settings, versions, mergeable statistics, and the dtypes that a
config of verl asks for."""
