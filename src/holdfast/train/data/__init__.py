"""The data of a run: token files, the mixture of them, and the order of samples as a pure function.

`sample(k)` follows from the seed, the manifest (what the sources are and how they are mixed) and k alone.
Nothing is shuffled ahead, nothing depends on the length of the run or on who asks, and a cursor is one
number. Failure cases: files are validated whole before a token is read, and a DataError names file and
offset.
"""

from holdfast.train.data.config import DataConfig, Source, Stage
from holdfast.train.data.ledger import Ledger
from holdfast.train.data.packing import Batch
from holdfast.train.data.prefetch import Prefetcher
from holdfast.train.data.stream import Stream

__all__ = ["Batch", "DataConfig", "Ledger", "Prefetcher", "Source", "Stage", "Stream"]
