"""Where nodes come from, and what a launch of a run is made of."""

from holdfast.launch.launcher import Launch, leave_wish
from holdfast.launch.plan import LaunchSettings

__all__ = ["Launch", "LaunchSettings", "leave_wish"]
