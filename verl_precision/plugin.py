"""What verl loads: importing this module registers everything this package offers, once per process."""

from verl_precision.integration.registration import REGISTRATIONS, Registration, registered

__all__ = ["REGISTRATIONS", "Registration", "registered"]
