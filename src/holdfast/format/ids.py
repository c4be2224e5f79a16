"""The id of a save, and the only file names a step folder may hold.

Names are built here and parsed here, nowhere else. A parser accepts exactly what the builder
makes and returns None for all else, so no name read from disk can leave its folder.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

import msgspec

from holdfast.arrays.text import show
from holdfast.errors import UsageError
from holdfast.format.limits import MAX_FILES, MAX_INT, MAX_PARTS

MANIFEST: Final = "manifest.json"
DATA_SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".index.json"

_WORD = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}"
_WORD_RE = re.compile(_WORD)
_STEP_RE = re.compile(r"step-([0-9]{8,19})")
_PART_RE = re.compile(rf"part-([0-9]{{5,7}})(?:-([0-9]{{1,4}}))?\.({_WORD})(\.safetensors|\.index\.json)")


class SaveId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attempt of one run to save one step; it fences every file of that save.

    `run` and `attempt` are 1 to 64 of `A-Z a-z 0-9 _ . -` and do not start with a dot.
    """

    run: str
    step: int
    attempt: str

    def __post_init__(self) -> None:
        _check_word("run", self.run)
        _check_int("step", self.step, MAX_INT)
        _check_word("attempt", self.attempt)

    def __str__(self) -> str:
        return f"{self.run}/{self.step}/{self.attempt}"

    @staticmethod
    def parse(text: str) -> SaveId:
        """The id whose `str()` is `text`; UsageError for anything else."""
        run, _, rest = text.partition("/")
        step, _, attempt = rest.partition("/")
        # The step is parsed only when canonical, so that parse and str are exact inverses.
        if not re.fullmatch(r"0|[1-9][0-9]{0,18}", step):
            raise UsageError(f"not a save id: {show(text)}", hint="a save id reads RUN/STEP/ATTEMPT")
        return SaveId(run, int(step), attempt)


class FileName(NamedTuple):
    """A parsed file name of a step folder; `part` and `file` are -1 where they do not apply."""

    kind: Literal["manifest", "data", "index"]
    attempt: str
    part: int
    file: int


def step_folder(step: int) -> str:
    """The folder name of a step: `step-00001200`."""
    _check_int("step", step, MAX_INT)
    return f"step-{step:08d}"


def parse_step_folder(name: str) -> int | None:
    """The step whose folder is called `name`; None unless `step_folder` would give that name."""
    match = _STEP_RE.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if step <= MAX_INT and step_folder(step) == name else None


def part_stem(part: int, attempt: str, file: int = 0) -> str:
    """The name of a part without its suffix: `part-00003.<attempt>`.

    Further files of a part are `part-00003-1.<attempt>` and so on; the file number stands before
    the attempt because an attempt may itself end in `.1`.
    """
    _check_int("part", part, MAX_PARTS - 1)
    _check_int("file", file, MAX_FILES - 1)
    _check_word("attempt", attempt)
    number = f"{part:05d}-{file}" if file else f"{part:05d}"
    return f"part-{number}.{attempt}"


def data_name(part: int, attempt: str, file: int = 0) -> str:
    """The name of a part's data file number `file`."""
    return part_stem(part, attempt, file) + DATA_SUFFIX


def index_name(part: int, attempt: str) -> str:
    """The name of a part's index."""
    return part_stem(part, attempt) + INDEX_SUFFIX


def parse_file_name(name: str) -> FileName | None:
    """What `name` is in a step folder; None for a name that no function here would give."""
    if name == MANIFEST:
        return FileName("manifest", "", -1, -1)
    match = _PART_RE.fullmatch(name)
    if match is None:
        return None
    part, file, attempt = int(match[1]), int(match[2] or 0), match[3]
    if part >= MAX_PARTS or file >= MAX_FILES:
        return None
    if match[4] == INDEX_SUFFIX:
        canonical = index_name(part, attempt)
        parsed = FileName("index", attempt, part, -1)
    else:
        canonical = data_name(part, attempt, file)
        parsed = FileName("data", attempt, part, file)
    return parsed if canonical == name else None


def _check_word(what: str, word: object) -> None:
    if not isinstance(word, str) or not _WORD_RE.fullmatch(word):
        raise UsageError(
            f"{what} {show(word)} cannot be part of a file name",
            hint="use 1 to 64 letters, digits, '_', '.' and '-', not starting with a dot",
        )


def _check_int(what: str, value: object, most: int) -> None:
    # Not isinstance: a bool or numpy integer would not come back from JSON as it went in.
    if not (type(value) is int and 0 <= value <= most):
        raise UsageError(f"{what} must be an int from 0 to {most}, not {show(value)}")
