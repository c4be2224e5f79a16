"""The one tree of exceptions.

    HoldfastError                  every error raised on purpose; carries a `hint`
    ├── UsageError                 a wrong call or argument (also a ValueError)
    │   ├── TreeError              a tree whose leaves cannot be named or stored
    │   ├── LayoutError            a layout or plan that does not make sense
    │   ├── ConfigError            a run's config has mistakes; lists every one, with the setting to change
    │   └── MismatchError          a template and what is to fill it disagree; lists every offender
    ├── DeadlineError              a wait ran out; says who was waited for (also a TimeoutError)
    ├── DataError                  training data missing, damaged or unfit; names file and offset
    ├── FormatError                bytes on disk that are not a valid checkpoint
    │   ├── CorruptError           a checksum does not match; names file, block and arrays
    │   └── VersionError           written by a newer Holdfast
    ├── StorageError               the file system or object store refused; carries path and errno
    │   ├── OutOfSpaceError
    │   ├── ReadOnlyError
    │   ├── MissingPathError
    │   ├── BusyPathError          another live process writes this file
    │   ├── AccessError            an object store refused the credentials, or there are none
    │   └── UnfitStoreError        a store without conditional writes: a commit could not be told from a clash
    ├── CheckpointError
    │   ├── NoCheckpointError      nothing to load
    │   ├── StepExistsError        a good step is never overwritten unless asked
    │   ├── SaveError              a save failed; the previous step stays loadable
    │   ├── MirrorError            a step is committed, and will not be on the mirror
    │   └── LeaseError             another live run writes to this folder
    ├── AgreementError             the writers of a save did not agree
    │   └── MissingRanksError      names the ranks that never answered (also a DeadlineError)
    ├── CoordError                 the coordinator refused a call; nothing changed
    │   ├── FencedError            this incarnation was replaced, declared dead or forgotten
    │   ├── StaleGenerationError   the call belongs to a generation that is over
    │   ├── BarrierError           an epoch failed for all its participants; names who and why
    │   │   └── BarrierTimeoutError  ... because the wait ran out (also a DeadlineError)
    │   ├── KeyExistsError         a key that was to be created is there
    │   ├── LimitError             too large or too many
    │   ├── UnreachableError       no coordinator answered in time: outcome unknown (also a DeadlineError)
    │   └── HandshakeError         wrong token, wrong run, or a peer that is no coordinator
    ├── TransferError              a transfer did not happen; the version before it stays in service
    │   ├── PeerLostError          a peer died, or its connection broke
    │   ├── StalledError           nothing came for too long (also a DeadlineError)
    │   ├── VersionGoneError       the peer has no such name or version (any more)
    │   ├── IntegrityError         bytes arrived that are not those that were sent
    │   └── TransferCancelled      it was cancelled here
    ├── StagingError               state could not be copied off a device by this route
    ├── WorldError                 a framework's world of several workers could not be started or left
    ├── BundleError                an executable bundle was refused; nothing of it was loaded
    ├── ReduceError                lanes could not be summed; what is folded here stays
    │   ├── ReplicaLostError       a member that is needed is gone; `slots` names it
    │   └── ReplicaLateError       a member that is needed did not answer in time (also a DeadlineError)
    ├── DivergedError              this worker's state is not that of the others; names slots and arrays
    └── VaultError                 the vault refused or broke the protocol
        └── VaultDiedError         the vault process is gone

Each message says what happened and the value seen; `hint` says what to do. `str()` gives both.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence


class HoldfastError(Exception):
    """Base of every error Holdfast raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"


class UsageError(HoldfastError, ValueError):
    """A wrong call or argument."""


class TreeError(UsageError):
    """A tree whose leaves cannot be named or stored."""


class LayoutError(UsageError):
    """A layout or plan that does not make sense."""


class ConfigError(UsageError):
    """A run's config has mistakes; every one is listed at once, each with the setting to change."""

    def __init__(self, problems: Iterable[str], *, hint: str | None = None) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        many = f"{len(self.problems)} mistakes" if len(self.problems) != 1 else "a mistake"
        super().__init__(f"the config has {many}:\n{lines}", hint=hint)


class MismatchError(UsageError):
    """A template and what it is to be filled from disagree; every offender is listed at once."""

    def __init__(
        self, problems: Iterable[str], *, source: str = "checkpoint", hint: str | None = None
    ) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        plural = "s" if len(self.problems) != 1 else ""
        super().__init__(
            f"template and {source} disagree in {len(self.problems)} place{plural}:\n{lines}",
            hint=hint,
        )


class DeadlineError(HoldfastError, TimeoutError):
    """A wait ran out. The message says who was waited for and since when."""


class DataError(HoldfastError):
    """Training data that is missing, damaged or does not fit. `file` and `offset` (in bytes) say where."""

    def __init__(
        self, message: str, *, file: str | None = None, offset: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.file = file
        self.offset = offset


class FormatError(HoldfastError):
    """Bytes on disk that are not a valid checkpoint."""


class CorruptError(FormatError):
    """A checksum does not match.

    `file` and `block` say where; `arrays` names what lies there.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        file: str | None = None,
        block: int | None = None,
        arrays: Sequence[str] = (),
    ) -> None:
        super().__init__(message, hint=hint)
        self.file = file
        self.block = block
        self.arrays = tuple(arrays)


class VersionError(FormatError):
    """Written by a newer Holdfast."""


class StorageError(HoldfastError):
    """The file system refused an operation."""

    def __init__(
        self, message: str, *, path: str, errno_: int | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.errno = errno_

    @staticmethod
    def from_os(error: OSError, *, doing: str, path: str) -> StorageError:
        """The typed error for an OSError met while `doing` something to `path`."""
        cls, hint = _OS_ERRORS.get(error.errno or 0, (StorageError, None))
        reason = error.strerror or str(error)
        return cls(f"cannot {doing} {path}: {reason}", path=path, errno_=error.errno, hint=hint)


class OutOfSpaceError(StorageError):
    """The disk or quota is full."""


class ReadOnlyError(StorageError):
    """The path may not be written."""


class MissingPathError(StorageError):
    """The path is not there."""


class BusyPathError(StorageError):
    """Another live process is writing this file."""


class AccessError(StorageError):
    """An object store refused the credentials, or there are none for it."""


class UnfitStoreError(StorageError):
    """An object store that does not honour conditional writes; nothing was saved there."""


_OS_ERRORS: dict[int, tuple[type[StorageError], str | None]] = {
    errno.ENOSPC: (OutOfSpaceError, "free space or keep fewer steps; earlier steps are untouched"),
    errno.EDQUOT: (OutOfSpaceError, "the quota is spent; earlier steps are untouched"),
    errno.EROFS: (ReadOnlyError, "the file system is read-only; remount it or choose another path"),
    errno.EACCES: (ReadOnlyError, "check the owner and mode of the path"),
    errno.EPERM: (ReadOnlyError, "check the owner and mode of the path"),
    errno.ENOENT: (MissingPathError, "check the path; was the folder removed or unmounted?"),
    errno.EIO: (StorageError, "the device reports an I/O error; look at the kernel log"),
    errno.ENOTDIR: (MissingPathError, "a file stands where a folder is needed"),
}


class CheckpointError(HoldfastError):
    """A checkpoint operation failed."""


class NoCheckpointError(CheckpointError):
    """There is nothing to load."""


class StepExistsError(CheckpointError):
    """The step is committed and good; it is never overwritten unless asked."""


class SaveError(CheckpointError):
    """A save failed; the previous step stays loadable."""


class MirrorError(CheckpointError):
    """A step is committed, and will not be on the mirror; the message says why."""


class LeaseError(CheckpointError):
    """Another live run writes checkpoints to this folder."""


class AgreementError(HoldfastError):
    """The writers of a save did not agree."""


class MissingRanksError(AgreementError, DeadlineError):
    """Some ranks never answered; `ranks` names them."""

    def __init__(self, message: str, *, ranks: Sequence[int], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.ranks = tuple(ranks)


class CoordError(HoldfastError):
    """The coordinator refused a call. `names` are those to blame, if anybody is."""

    def __init__(self, message: str, *, hint: str | None = None, names: Iterable[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.names = tuple(names)


class FencedError(CoordError):
    """This incarnation was replaced, declared dead or forgotten; only a new one can take part again."""


class StaleGenerationError(CoordError):
    """The call belongs to a generation that is over."""


class BarrierError(CoordError):
    """An epoch of a barrier failed, for all its participants alike."""


class BarrierTimeoutError(BarrierError, DeadlineError):
    """An epoch of a barrier failed because somebody did not come in time."""


class KeyExistsError(CoordError):
    """A key that was to be created is there."""


class LimitError(CoordError):
    """Too large, or too many."""


class UnreachableError(CoordError, DeadlineError):
    """No coordinator answered in time. Whether the call was carried out is not known."""


class HandshakeError(CoordError):
    """Wrong token, wrong run, or a peer that is no coordinator."""


class TransferError(HoldfastError):
    """A transfer did not happen; the version before it stays in service."""


class PeerLostError(TransferError):
    """A peer died, or its connection broke. The next run connects again."""


class StalledError(TransferError, DeadlineError):
    """Nothing came for too long: the peer is stopped or stuck, or the network drops what it sends."""


class VersionGoneError(TransferError):
    """The peer has no such name or version, or has it no more."""


class IntegrityError(TransferError):
    """Bytes arrived that are not those that were sent."""


class TransferCancelled(TransferError):
    """The transfer was cancelled by its caller."""


class StagingError(HoldfastError):
    """State could not be copied off a device by this route; another is taken, and the save goes on.

    `stuck`: a copy may still be under way, so the memory it goes to must not be used again.
    """

    def __init__(self, message: str, *, hint: str | None = None, stuck: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.stuck = stuck


class WorldError(HoldfastError):
    """A framework's world of several workers could not be started or left."""


class BundleError(HoldfastError):
    """An executable bundle was refused: altered, cut off, or made for something else. Nothing was loaded."""


class ReduceError(HoldfastError):
    """Lanes could not be summed. What is folded here stays, and can go into the next generation."""

    def __init__(self, message: str, *, slots: Sequence[int] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.slots = tuple(slots)


class ReplicaLostError(ReduceError):
    """A member whose lanes or share are needed is gone."""


class ReplicaLateError(ReduceError, DeadlineError):
    """A member whose lanes or share are needed did not answer in time."""


class DivergedError(HoldfastError):
    """This worker's state is not that of the other replicas: it was damaged here, or nobody can say where."""


class VaultError(HoldfastError):
    """The vault refused a request or broke the protocol."""


class VaultDiedError(VaultError):
    """The vault process is gone."""
