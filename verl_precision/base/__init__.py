"""The ground that every room stands on: errors, files, settings, versions, mergeable statistics, and the dtypes that a
config of verl asks for."""
