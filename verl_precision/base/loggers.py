"""The loggers of this package, one for each subject; integration/registration.py gives them a level and a handler."""

import logging

general = logging.getLogger("verl_precision")
engine, mismatch, weight_sync = map(general.getChild, ("engine", "mismatch", "weight_sync"))
