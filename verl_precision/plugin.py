"""The module that verl loads. Importing it registers everything this package offers, once per process.

An error here ends the process, because verl logs a failed plugin only at DEBUG and would continue without it.
"""

from verl_precision.base.errors import ending_the_process

with ending_the_process("the plugin (VERL_USE_EXTERNAL_PLUGINS=none runs verl without it)"):
    from verl_precision.integration.registration import REGISTRATIONS, Registration, registered

__all__ = ["REGISTRATIONS", "Registration", "registered"]
