"""What a run reads: sources, how they are mixed, how they are split, and what counts in the loss."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Final, final

from holdfast.train.problems import Problem, one_of, refuse

if TYPE_CHECKING:
    from holdfast.train.data.manifest import Manifest
    from holdfast.train.data.stream import Stream

TINY: Final = "builtin:tiny"
"""The source that comes with the package: a book of 150 KB, as bytes."""
SPLITS: Final = ("train", "valid", "test")
_MOST_SEQ: Final = 1 << 24


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A set of documents, and its share of a blend."""

    path: str = TINY
    """Prefix of a `.bin` and an `.idx` file, or `builtin:tiny`."""
    weight: float = 1.0
    """Its share of the samples, relative to the other sources of the same split."""
    split: str = ""
    """The one split that it feeds, whole: train, valid or test. Empty: it is cut by `data.split`."""
    name: str = ""
    """What it is called; the order of its samples hangs on this name. Empty: the last part of `path`, so that
    files can move."""

    @property
    def label(self) -> str:
        """The name, given or derived."""
        return self.name or os.path.basename(self.path)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """From sample `start` on, other weights."""

    start: int
    """The first sample (of the whole run) that is mixed like this."""
    weights: tuple[float, ...]
    """One for each source of the training split, in their order; 0 leaves one out."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where tokens come from and how samples are made of them."""

    sources: tuple[Source, ...] = (Source(),)
    """What is mixed."""
    blend: str = ""
    """A JSON file that says so instead: see the guide on data. Excludes `sources`."""
    split: str = "949,50,1"
    """Shares of the documents for train, valid and test; each takes consecutive ones."""
    stages: tuple[Stage, ...] = ()
    """Changes of the training mixture, by sample. Adding one changes nothing before its start."""
    tokenizer: str = ""
    """`byte`, or the path of a tokenizer.json. Empty: what the token files say they were made with."""
    vocab_size: int = 0
    """Ids are below this. 0: what the tokenizer or the token files say."""
    separate: bool = True
    """Documents that share a sample do not see each other: attention stays inside a document, positions start
    again, and no token is asked to predict the next document."""
    loss_on_eod: bool = True
    """Whether the model is taught to end a document."""
    loss_ignore: tuple[int, ...] = ()
    """Token ids that are never a target, such as padding or the markers of a chat template."""

    def build(
        self, *, seq_len: int, seed: int = 0, split: str = "train", manifest: Manifest | None = None
    ) -> Stream:
        """The stream of one split.

        Reads the indexes of its sources; with the `manifest` of another process, nothing at all until the
        first batch. Fails: ConfigError with every mistake; DataError for a source that is missing, damaged or
        too small.
        """
        from holdfast.train.data.stream import Stream

        refuse(one_of("split", split, SPLITS) + (self.problems(seq_len) if manifest is None else []))
        return Stream(self, seq_len=seq_len, seed=seed, split=split, manifest=manifest)

    def resolved(self) -> tuple[Source, ...]:
        """The sources, those of the blend file where one is given. Fails: DataError for a file that is
        none."""
        from holdfast.train.data.blends import read_blend

        return read_blend(self.blend) if self.blend else self.sources

    def spelled_out(self) -> DataConfig:
        """The same without a blend file, which may change while others still read it. Fails: DataError."""
        return replace(self, sources=self.resolved(), blend="") if self.blend else self

    def problems(self, seq_len: int) -> list[Problem]:
        """Every mistake in these settings; looks whether files are there, and opens only the blend file."""
        from holdfast.errors import HoldfastError

        found = self._plain_problems(seq_len)
        if self.blend and self.sources != (Source(),):
            found.append(Problem("data.blend", "is given beside data.sources", "remove one of them"))
            return found
        try:
            sources = self.resolved()
        except HoldfastError as error:
            return [*found, Problem("data.blend", f"cannot be used: {error.message}", error.hint or "")]
        for at, source in enumerate(sources):
            found += _source_problems(f"data.sources[{at}]", source)
        found += _blend_problems(sources)
        return found + self._stage_problems([one for one in sources if one.split in ("", "train")])

    def _plain_problems(self, seq_len: int) -> list[Problem]:
        found = []
        if not 1 <= seq_len <= _MOST_SEQ:
            found.append(Problem("seq_len", f"is {seq_len}", f"it must be 1 to {_MOST_SEQ}"))
        if fractions(self.split) is None:
            found.append(Problem("data.split", f"is {self.split!r}", "three shares, such as 949,50,1"))
        if self.vocab_size < 0:
            found.append(Problem("data.vocab_size", f"is {self.vocab_size}", "it must be 0 or more"))
        if self.tokenizer not in ("", "byte") and not os.path.isfile(self.tokenizer):
            found.append(
                Problem("data.tokenizer", f"is {self.tokenizer!r}", "byte, or the path of a tokenizer.json")
            )
        if any(token < 0 for token in self.loss_ignore):
            found.append(Problem("data.loss_ignore", f"is {self.loss_ignore}", "token ids are 0 or more"))
        return found

    def _stage_problems(self, sources: list[Source]) -> list[Problem]:
        found = []
        for at, stage in enumerate(self.stages):
            where = f"data.stages[{at}].weights"
            if len(stage.weights) != len(sources):
                message = f"has {len(stage.weights)} weights for {len(sources)} sources of the training split"
                names = ", ".join(source.label for source in sources)
                found.append(Problem(where, message, f"one for each, in this order: {names}"))
            elif not _good(stage.weights):
                found.append(Problem(where, f"is {stage.weights}", "0 or more each, and one above 0"))
        starts = [0, *(stage.start for stage in self.stages)]
        if any(b <= a for a, b in pairwise(starts)):
            found.append(
                Problem("data.stages", f"start at {starts[1:]}", "above 0, and each later than the last")
            )
        return found


def fractions(text: str) -> tuple[Fraction, ...] | None:
    """The shares of train, valid and test that `text` stands for, as they add up to 1; None if it is no such
    text.

    Missing ones are 0: "9,1" has no test split.
    """
    parts = text.split(",")
    try:
        shares = [Fraction(part.strip()) for part in parts]
    except (ValueError, ZeroDivisionError):
        return None
    if len(shares) > len(SPLITS) or min(shares) < 0 or not sum(shares):
        return None
    shares += [Fraction(0)] * (len(SPLITS) - len(shares))
    return tuple(share / sum(shares) for share in shares)


def _good(weights: tuple[float, ...]) -> bool:
    return all(math.isfinite(weight) and weight >= 0 for weight in weights) and any(weights)


def _source_problems(where: str, source: Source) -> list[Problem]:
    found = []
    if not (math.isfinite(source.weight) and source.weight >= 0):
        found.append(Problem(f"{where}.weight", f"is {source.weight}", "it must be 0 or more"))
    if source.split:
        found += one_of(f"{where}.split", source.split, SPLITS)
    if source.path.startswith("builtin:"):
        return found + one_of(f"{where}.path", source.path, (TINY,))
    if not source.label:
        found.append(Problem(f"{where}.path", f"is {source.path!r}", "the prefix of a .bin and an .idx file"))
        return found
    missing = [f"{source.path}{end}" for end in (".idx", ".bin") if not os.path.isfile(f"{source.path}{end}")]
    if missing:
        hint = "make it with `holdfast data build`, or check the path"
        found.append(Problem(f"{where}.path", f"names no token files: {' and '.join(missing)} missing", hint))
    return found


def _blend_problems(sources: tuple[Source, ...]) -> list[Problem]:
    """What is wrong with the sources together."""
    found = []
    if not sources:
        return [Problem("data.sources", "is empty", f"name at least one source, such as {TINY}")]
    whole = {source.path: source.split for source in sources if source.split}
    for split in SPLITS:
        feeding = [source for source in sources if source.split in ("", split)]
        if split == "train" and not _good(tuple(source.weight for source in feeding)):
            found.append(Problem("data.sources", "gives no weight to any source of train", "one above 0"))
        for name, times in Counter(source.label for source in feeding).items():
            if times > 1:
                message = f"has {times} sources of {split} called {name!r}"
                found.append(Problem("data.sources", message, "give them a name= of their own each"))
    for source in sources:
        if source.path in whole and whole[source.path] != source.split:
            message = f"puts {source.path} into more than one split"
            found.append(
                Problem("data.sources", message, "leave split empty there, and cut it by data.split")
            )
            break
    return found
