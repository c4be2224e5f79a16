"""Who is in the run, and agreement between them.

What a program needs is bound on first use: a run of one process pays for no server or client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from holdfast.coord.agreement import Agreement
from holdfast.coord.shared_folder import HELLO, SharedFolderAgreement
from holdfast.coord.solo import SoloAgreement

if TYPE_CHECKING:
    from holdfast.coord.address import check_addresses
    from holdfast.coord.aio import AsyncCoordClient
    from holdfast.coord.client import CoordClient
    from holdfast.coord.coord_agreement import CoordAgreement
    from holdfast.coord.messages import (
        Changed,
        Joined,
        Lost,
        Met,
        Overview,
        Patience,
        Rally,
        Stop,
        Swapped,
        Trouble,
    )
    from holdfast.coord.server import serve
    from holdfast.coord.settings import Settings

__all__ = [
    "HELLO",
    "Agreement",
    "AsyncCoordClient",
    "Changed",
    "CoordAgreement",
    "CoordClient",
    "Joined",
    "Lost",
    "Met",
    "Overview",
    "Patience",
    "Rally",
    "Settings",
    "SharedFolderAgreement",
    "SoloAgreement",
    "Stop",
    "Swapped",
    "Trouble",
    "check_addresses",
    "serve",
]

_HOME = {
    "AsyncCoordClient": "aio",
    "Changed": "messages",
    "CoordAgreement": "coord_agreement",
    "CoordClient": "client",
    "Joined": "messages",
    "Lost": "messages",
    "Met": "messages",
    "Overview": "messages",
    "Patience": "messages",
    "Rally": "messages",
    "Settings": "settings",
    "Stop": "messages",
    "Swapped": "messages",
    "Trouble": "messages",
    "check_addresses": "address",
    "serve": "server",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast.coord' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"holdfast.coord.{home}"), name)
    globals()[name] = value
    return value
