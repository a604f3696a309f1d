"""What verl loads: importing this module registers everything this package offers, once per process.

What that raises ends the process: verl logs a plugin that fails at DEBUG only, and would go on without it.
"""

from verl_precision.base.errors import ending_the_process

with ending_the_process("the plugin (VERL_USE_EXTERNAL_PLUGINS=none is verl without it)"):
    from verl_precision.integration.registration import REGISTRATIONS, Registration, registered

__all__ = ["REGISTRATIONS", "Registration", "registered"]
