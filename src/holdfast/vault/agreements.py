"""The agreement that trainer and vault both use, by its name on the wire."""

from __future__ import annotations

import hashlib

from holdfast.coord import Agreement, SharedFolderAgreement, SoloAgreement
from holdfast.errors import VaultError
from holdfast.storage import Store
from holdfast.vault.messages import CoordinatorAt
from holdfast.vault.recycling import AGREEMENT, WORK


def make_agreement(
    store: Store, kind: str, rank: int, world: int, coordinator: CoordinatorAt | None = None
) -> Agreement:
    """The agreement of this kind for one rank. Fails: VaultError for an unknown kind."""
    if kind == "solo":
        return SoloAgreement()
    if kind == "folder":
        return SharedFolderAgreement(store.below(WORK, AGREEMENT), rank=rank, world=world)
    if kind == "coordinator" and coordinator is not None:
        # Two folders of one run are two agreements; all ranks see a folder under the same path.
        from holdfast.coord import CoordAgreement  # its client is paid for by those who use it

        folder = hashlib.sha256(store.root.encode()).hexdigest()[:16]
        return CoordAgreement(
            coordinator.addresses,
            rank=rank,
            world=world,
            scope=f"ckpt/{folder}",
            run=coordinator.run,
            token=coordinator.token,
        )
    raise VaultError(f"unknown agreement {kind!r}", hint="use 'solo', 'folder' or 'coordinator'")
