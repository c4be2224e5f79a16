"""Byte ranges on disks, and create-if-absent as the only commit.

States of a file: being made (`.tmp-…`, or a part named by its attempt and locked by its writer), durable
(synced together with its folder), visible (its final name). Failure cases: the space is reserved before
the first byte, so a full disk is met before damage; a crash leaves only names that nothing refers to.
"""

from holdfast.storage.files import ALIGN, Files
from holdfast.storage.local import TEMPORARY, LocalStore
from holdfast.storage.places import local_path, opened
from holdfast.storage.store import (
    PROBE,
    Hold,
    PartReader,
    PartWriter,
    Store,
    StoreOptions,
    Upload,
    Version,
    is_trouble,
    is_url,
)

__all__ = [
    "ALIGN",
    "PROBE",
    "TEMPORARY",
    "Files",
    "Hold",
    "LocalStore",
    "PartReader",
    "PartWriter",
    "Store",
    "StoreOptions",
    "Upload",
    "Version",
    "is_trouble",
    "is_url",
    "local_path",
    "opened",
]
