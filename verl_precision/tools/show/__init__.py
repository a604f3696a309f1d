"""Tables and figures, with one look for all verbs."""
