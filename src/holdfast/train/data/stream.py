"""The stream: sample k of a run, for any k, from the seed and the manifest alone."""

from __future__ import annotations

import threading
from typing import Final, NamedTuple, final

import numpy as np
import xxhash

from holdfast.errors import DataError, UsageError
from holdfast.train.data.config import DataConfig
from holdfast.train.data.ledger import Ledger
from holdfast.train.data.manifest import Manifest, SourceEntry, make_manifest
from holdfast.train.data.mixture import Indexes, Mixture
from holdfast.train.data.packing import Batch, document_starts, pack
from holdfast.train.data.permutation import Words, mixed, permuted
from holdfast.train.data.tokens import TokenSet, check_ids, opened

_SLAB: Final = 1 << 17
"""Samples that a ledger is computed from at a time."""
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)


class _Picks(NamedTuple):
    """For each of some samples: its source, the epoch of that source, and which of its windows."""

    sources: Indexes
    epochs: Indexes
    windows: Indexes


@final
class Stream:
    """One split of a blend, in the order of a seed. Threads may share it.

    `DataConfig.build` makes it. Token files are opened by the first `batch`, or were opened for the manifest.
    """

    def __init__(
        self, config: DataConfig, *, seq_len: int, seed: int, split: str, manifest: Manifest | None = None
    ) -> None:
        self._sets: list[TokenSet] | None = None
        self._lock = threading.Lock()
        self._closed = False
        if manifest is None:
            manifest, self._sets = make_manifest(config, seq_len=seq_len, split=split)
        elif (manifest.seq_len, manifest.split) != (seq_len, split):
            raise UsageError(
                f"the manifest is of the {manifest.split} split in samples of {manifest.seq_len:,} tokens, "
                f"not of {split} in {seq_len:,}",
                hint="give the manifest of a stream of the same config",
            )
        self.manifest = manifest
        self.seed = seed
        self.separate = config.separate
        ignored = set(config.loss_ignore)
        if not config.loss_on_eod and manifest.eod is not None:
            ignored.add(manifest.eod)
        self._ignored = tuple(sorted(ignored))
        self._mixture = Mixture(manifest.starts, manifest.weights)
        names = [entry.name for entry in manifest.sources]
        self._order_keys = _keys(*(f"order\0{seed}\0{split}\0{name}" for name in names))
        self._identity_keys = _keys(*(_told(entry, manifest) for entry in manifest.sources))

    # ---- what it is

    @property
    def seq_len(self) -> int:
        """Tokens of a sample."""
        return self.manifest.seq_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.manifest.vocab_size

    @property
    def digest(self) -> str:
        """Of the manifest: equal where the data and its mixture are. A later stage changes it and no earlier
        sample: whether two streams agree on what has been consumed is for `ledger` to say."""
        return self.manifest.digest

    @property
    def samples_per_epoch(self) -> int:
        """Different samples that there are, over all sources."""
        return sum(entry.samples for entry in self.manifest.sources)

    # ---- pure arithmetic

    def identities(self, start: int, stop: int) -> Words:
        """A number for each of samples `start` to `stop` - 1: of its source, its place there and the epoch.

        Opens no file. No number comes twice in a run.
        """
        picks = self._picks(start, stop)
        sizes = np.array([entry.samples for entry in self.manifest.sources], np.uint64)[picks.sources]
        within = picks.epochs.astype(np.uint64) * sizes + picks.windows.astype(np.uint64)
        return mixed(within + self._identity_keys[picks.sources])

    def ledger(self, samples: int) -> Ledger:
        """What the ledger must be after `samples`. Opens no file; takes 0.3 s of CPU time for a million."""
        ledger = Ledger.empty()
        for start in range(0, samples, _SLAB):
            stop = min(start + _SLAB, samples)
            ledger = ledger.advance(start, stop, self.identities(start, stop))
        return ledger

    def counts(self, samples: int) -> dict[str, int]:
        """How many of the first `samples` come from each source."""
        names = [entry.name for entry in self.manifest.sources]
        return dict(zip(names, self._mixture.counts(samples).tolist(), strict=True))

    def _picks(self, start: int, stop: int) -> _Picks:
        if not 0 <= start <= stop:
            raise UsageError(f"no samples from {start:,} to {stop:,}", hint="give 0 <= start <= stop")
        sources, cursors = self._mixture.draw(start, stop)
        epochs, windows = np.empty_like(cursors), np.empty_like(cursors)
        for number in _present(sources):
            rows = np.flatnonzero(sources == number)
            epochs[rows], ranks = np.divmod(cursors[rows], self.manifest.sources[number].samples)
            # Every epoch of every source has a permutation of its own.
            keys = mixed(
                self._order_keys[number] ^ mixed((epochs[rows].astype(np.uint64) + np.uint64(1)) * _STEP)
            )
            placed = permuted(ranks.astype(np.uint64), self.manifest.sources[number].samples, keys)
            windows[rows] = placed.astype(np.int64)
        return _Picks(sources, epochs, windows)

    # ---- tokens

    def batch(self, start: int, stop: int) -> Batch:
        """Samples `start` to `stop` - 1 of the run, the same whoever asks and however a batch is cut.

        Reads files, which it opens if need be. Fails: DataError with file and offset.
        """
        picks = self._picks(start, stop)
        sets = self._opened()
        width = self.seq_len + 1
        windows = np.empty((stop - start, width), np.int32)
        begins = np.empty(windows.shape, np.bool_) if self.separate else None
        for number in _present(picks.sources):
            rows = np.flatnonzero(picks.sources == number)
            entry, tokens = self.manifest.sources[number], sets[number]
            starts = entry.first_token + picks.windows[rows] * self.seq_len
            buffer = np.empty(width, tokens.dtype)
            for row, at in zip(rows.tolist(), starts.tolist(), strict=True):
                tokens.window(at, buffer)
                check_ids(tokens, buffer, at, self.vocab_size)
                windows[row] = buffer
            if begins is not None:
                begins[rows] = document_starts(tokens.documents, starts, width)
        return pack(windows, begins, ignored=self._ignored)

    def _opened(self) -> list[TokenSet]:
        with self._lock:
            if self._closed:
                raise UsageError("the stream is closed", hint="build another one")
            if self._sets is None:
                self._sets = [_matching(entry) for entry in self.manifest.sources]
            return self._sets

    def close(self) -> None:
        """Close the files. Identities can still be asked for; batches cannot."""
        with self._lock:
            self._closed = True
            for tokens in self._sets or ():
                tokens.close()
            self._sets = None


def _present(sources: Indexes) -> list[int]:
    """The numbers of the sources that occur."""
    found: list[int] = np.flatnonzero(np.bincount(sources)).tolist()
    return found


def _keys(*texts: str) -> Words:
    return np.array([xxhash.xxh3_64_intdigest(text.encode()) for text in texts], np.uint64)


def _told(entry: SourceEntry, manifest: Manifest) -> str:
    parts = (manifest.split, manifest.seq_len, entry.name, entry.fingerprint, entry.first_token)
    return "\0".join(("identity", *map(str, parts)))


def _matching(entry: SourceEntry) -> TokenSet:
    """The open set of a manifest's source. Fails: DataError, if it is another one here."""
    tokens = opened(entry.path)
    if (tokens.fingerprint, tokens.content) == (entry.fingerprint, entry.content):
        return tokens
    tokens.close()
    end, found, wanted = ".idx", tokens.fingerprint, entry.fingerprint
    if found == wanted:
        end, found, wanted = ".bin", tokens.content, entry.content
    raise DataError(
        f"{entry.path}{end}, byte 0: is not the set that the run reads: its digest is {found}, not {wanted}",
        file=f"{entry.path}{end}",
        offset=0,
        hint="put the same files on every node",
    )
