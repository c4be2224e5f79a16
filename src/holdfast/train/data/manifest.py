"""The manifest of a stream: all that the order of its samples depends on, beside the seed.

It is small, has no paths of a machine in its digest, and can be sent to a process that has no data at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import msgspec
import xxhash

from holdfast.errors import ConfigError, DataError, UsageError
from holdfast.train.data.config import SPLITS, DataConfig, Source, fractions
from holdfast.train.data.tokenizer import make_tokenizer
from holdfast.train.data.tokens import TokenSet, opened


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SourceEntry:
    """One source of a split: which of its tokens, and how many samples they make."""

    name: str
    path: str
    fingerprint: str
    """Of its index: where its documents lie. Samples are known by it."""
    content: str = ""
    """Of its tokens, of samples of a large file; empty: the fingerprint is of all of them."""
    tokens_digest: str = ""
    """Of all its tokens, as they were written; empty: nobody has kept it."""
    first_token: int
    num_tokens: int
    samples: int
    """In one epoch of the source."""

    def holds_what(self, other: SourceEntry) -> bool:
        """Whether the tokens are those of `other`, as far as both tell."""
        written = {self.tokens_digest, other.tokens_digest} - {""}
        mine, theirs = (self.fingerprint, self.content), (other.fingerprint, other.content)
        return mine == theirs and len(written) < 2


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One split of a blend, resolved."""

    split: str
    seq_len: int
    sources: tuple[SourceEntry, ...]
    starts: tuple[int, ...]
    """The first sample of each stage; the first is 0."""
    weights: tuple[tuple[float, ...], ...]
    """Of each stage, one for each source."""
    vocab_size: int
    eod: int | None

    @property
    def digest(self) -> str:
        """32 hex digits over everything but what may differ between two copies: paths, and cards."""
        told = msgspec.to_builtins(self)
        for entry in told["sources"]:
            del entry["path"], entry["tokens_digest"]
            if not entry["content"]:
                del entry["content"]
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(told, order="deterministic"))

    def to_json(self) -> bytes:
        """For another process."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """What `to_json` gave. Fails: UsageError."""
        try:
            return msgspec.json.decode(data, type=Manifest)
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"not the manifest of a stream: {error}", hint="give what to_json() gave"
            ) from None


def make_manifest(config: DataConfig, *, seq_len: int, split: str) -> tuple[Manifest, list[TokenSet]]:
    """The manifest of a split, and its sources, open. Reads the index of each.

    Fails: DataError for a source that is missing, damaged, too small for one sample, or of another tokenizer.
    """
    feeding = [source for source in config.resolved() if source.split in ("", split)]
    weights = [tuple(source.weight for source in feeding)]
    starts = [0]
    if split == "train":
        starts += [stage.start for stage in config.stages]
        weights += [stage.weights for stage in config.stages]
    # A source without weight in any stage is not needed, and not opened.
    used = [at for at in range(len(feeding)) if any(stage[at] for stage in weights)]
    if not used:
        raise DataError(
            f"no source feeds the {split} split", hint=f"add a Source with split={split!r}, or data.split"
        )
    sets: list[TokenSet] = []
    try:
        sets += (opened(feeding[at].path) for at in used)
        entries = tuple(
            _entry(config, feeding[at], tokens, seq_len=seq_len, split=split)
            for at, tokens in zip(used, sets, strict=True)
        )
        vocab_size, eod = _vocabulary(config, sets)
    except BaseException:
        for tokens in sets:
            tokens.close()
        raise
    manifest = Manifest(
        split=split,
        seq_len=seq_len,
        sources=entries,
        starts=tuple(starts),
        weights=tuple(tuple(float(stage[at]) for at in used) for stage in weights),
        vocab_size=vocab_size,
        eod=eod,
    )
    return manifest, sets


def _entry(config: DataConfig, source: Source, tokens: TokenSet, *, seq_len: int, split: str) -> SourceEntry:
    documents = len(tokens.documents) - 1
    first, last = (0, documents) if source.split else document_range(config.split, documents, split)
    start, end = int(tokens.documents[first]), int(tokens.documents[last])
    # Each sample needs one token more than it has inputs; neighbours share that one.
    samples = (end - start - 1) // seq_len
    if samples < 1:
        raise DataError(
            f"the {split} split of {source.path} has {end - start:,} tokens in {last - first:,} of "
            f"{documents:,} documents; one sample takes {seq_len + 1:,}",
            file=source.path,
            hint="lower seq_len, give the split a larger share in data.split, or give it a source of its own",
        )
    return SourceEntry(
        name=source.label,
        path=source.path,
        fingerprint=tokens.fingerprint,
        content=tokens.content,
        tokens_digest="" if tokens.card is None else tokens.card.tokens_digest,
        first_token=start,
        num_tokens=end - start,
        samples=samples,
    )


def document_range(shares: str, documents: int, split: str) -> tuple[int, int]:
    """The first document of a split and the end of its last, of `documents`. Splits never share one."""
    parts = fractions(shares)
    if parts is None:
        raise ConfigError([f"data.split is {shares!r}; three shares, such as 949,50,1"])
    at = SPLITS.index(split)
    first, last = (int(sum(parts[:to]) * documents * 2 + 1) // 2 for to in (at, at + 1))
    return first, last


def _vocabulary(config: DataConfig, sets: list[TokenSet]) -> tuple[int, int | None]:
    """The vocabulary that all sources share, and the token that ends a document wherever one does."""
    cards = {tokens.path: tokens.card for tokens in sets if tokens.card is not None}
    made = {card.tokenizer_digest: path for path, card in cards.items()}
    if len(made) > 1:
        (one, two), *_ = zip(made.values(), list(made.values())[1:], strict=False)
        hint = "make both with the same tokenizer"
        raise DataError(f"{one} and {two} were made with different tokenizers", file=two, hint=hint)
    ends = {card.eod: path for path, card in cards.items() if card.eod is not None}
    if len(ends) > 1 and not config.loss_on_eod:
        (first, here), (second, there), *_ = ends.items()
        raise DataError(
            f"without loss_on_eod: documents end with token {first} in {here}, with {second} in {there}",
            file=there,
            hint="make both with the same --eod, or set data.loss_on_eod to true",
        )
    size, eod = config.vocab_size, next(iter(ends)) if len(ends) == 1 else None
    for path, card in cards.items():
        if config.vocab_size and config.vocab_size < card.vocab_size:
            message = (
                f"{path} has a vocabulary of {card.vocab_size:,}; data.vocab_size is {config.vocab_size:,}"
            )
            raise DataError(
                message, file=path, hint=f"set data.vocab_size to 0, or to {card.vocab_size} or more"
            )
        size = max(size, card.vocab_size)
    if config.tokenizer:
        tokenizer = make_tokenizer(config.tokenizer)
        for path, card in cards.items():
            if card.tokenizer_digest != tokenizer.digest:
                message = (
                    f"{path} was made with {card.tokenizer!r}, not with data.tokenizer {config.tokenizer!r}"
                )
                raise DataError(message, file=path, hint="make it again, or leave data.tokenizer empty")
        size, eod = max(size, tokenizer.vocab_size), tokenizer.eod if eod is None else eod
    if not size:
        hint = "set data.vocab_size, or data.tokenizer to the one that made them"
        raise DataError(
            "the token files do not say how large their vocabulary is", file=sets[0].path, hint=hint
        )
    if eod is None and not config.loss_on_eod:
        hint = "set data.tokenizer to the one that made them, or data.loss_on_eod to true"
        raise DataError(
            "data.loss_on_eod is false, but no token ends a document", file=sets[0].path, hint=hint
        )
    return size, eod
