"""The ledger: 16 bytes that say which samples were consumed, in which order, each exactly once.

Every sample adds a hash of its place k and its identity, modulo 2^64 in each of two words. The sum does not
depend on where batches were cut, so a run that was stopped, resized or restarted has the ledger of one that
was not, and the stream alone can say what it must be. It finds mistakes; it does not stop someone who wants
to deceive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from holdfast.errors import UsageError
from holdfast.train.data.permutation import Words, mixed

_SALTS: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
_MASK: Final = (1 << 64) - 1


@final
@dataclass(frozen=True, slots=True)
class Ledger:
    """What has been consumed: samples 0 to `samples` - 1. Immutable."""

    samples: int
    """How many."""
    low: int
    high: int

    @staticmethod
    def empty() -> Ledger:
        """Nothing consumed."""
        return Ledger(0, 0, 0)

    @staticmethod
    def restored(samples: int, words: npt.ArrayLike) -> Ledger:
        """The ledger that had these `words` after `samples`. Fails: UsageError, if they are not two words."""
        pair: npt.NDArray[Any] = np.asarray(words)
        if pair.shape != (2,) or pair.dtype != np.uint64 or samples < 0:
            raise UsageError(
                f"not a ledger: {pair.dtype}{list(pair.shape)} after {samples} samples",
                hint="give the two uint64 words that `Ledger.words` returned",
            )
        return Ledger(int(samples), int(pair[0]), int(pair[1]))

    @property
    def words(self) -> Words:
        """The 16 bytes as uint64[2], for a checkpoint."""
        return np.array([self.low, self.high], np.uint64)

    @property
    def digest(self) -> str:
        """The 16 bytes as 32 hex digits."""
        return f"{self.low:016x}{self.high:016x}"

    def advance(self, start: int, stop: int, identities: Words) -> Ledger:
        """The ledger after samples `start` to `stop` - 1 too, which are `identities`.

        Fails: UsageError for a gap, a repeat, or another number of identities.
        """
        if start != self.samples or stop < start:
            what = "again" if start < self.samples else "after a gap" if start > self.samples else "backwards"
            raise UsageError(
                f"samples {start:,} to {stop:,} would be consumed {what}: the ledger is at {self.samples:,}",
                hint="batches follow each other without gaps; restore data and params from the same step",
            )
        if identities.shape != (stop - start,) or identities.dtype != np.uint64:
            raise UsageError(
                f"{identities.dtype}{list(identities.shape)} for the identities of {stop - start:,} samples",
                hint="they are what `Stream.identities(start, stop)` returns",
            )
        places = np.arange(start, stop, dtype=np.uint64)
        sums = [int(np.sum(mixed(mixed(places + salt) ^ identities), dtype=np.uint64)) for salt in _SALTS]
        return Ledger(stop, (self.low + sums[0]) & _MASK, (self.high + sums[1]) & _MASK)
