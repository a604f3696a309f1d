"""The verb `check` for a run, a checkpoint, an installation or a cluster; the rules belong to the plugin."""
