"""How the conformance tests make members, in their own process or in a child."""

from __future__ import annotations

from holdfast.coord import Agreement, SharedFolderAgreement
from holdfast.storage import LocalStore


def shared_folder(place: str, rank: int, world: int) -> Agreement:
    return SharedFolderAgreement(LocalStore(f"{place}/agreement"), rank=rank, world=world)


def made_folder(place: str, rank: int, world: int) -> Agreement:
    """As `shared_folder`; the folder is there, as after `session`."""
    LocalStore(f"{place}/agreement").make_root()
    return shared_folder(place, rank, world)
