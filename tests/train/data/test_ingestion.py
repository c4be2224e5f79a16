"""Text in, token sets out: which documents, which errors, and nothing half-made to see."""

from __future__ import annotations

import errno
import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import faults
from holdfast.errors import DataError, OutOfSpaceError, StorageError, UsageError
from holdfast.storage import Files
from holdfast.train.data import DataConfig, Source
from holdfast.train.data.ingestion import Built, Recipe, build, input_files
from holdfast.train.data.tokenizer import ByteTokenizer
from holdfast.train.data.tokens import TokenFiles
from holdfast.train.data.writer import TokenWriter
from tests.cli.saved import answer, holdfast
from tests.train.data import words


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder as people have it."""
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "b.jsonl").write_text('{"text": "one", "id": 1}\n\n{"text": "zwö", "id": 2}\n{"text": ""}\n')
    (folder / "a.txt").write_text("first line\n\nsecond\nparagraph\n")
    (folder / "deep" / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    (folder / "notes.pdf").write_bytes(b"%PDF")
    (folder / ".hidden" / "d.txt").write_text("not this")
    return folder


def documents(path: Path) -> list[str]:
    tokens = TokenFiles(str(path))
    window = np.empty(int(tokens.documents[-1]), tokens.dtype)
    tokens.window(0, window)
    tokens.close()
    assert (window[tokens.documents[1:] - 1] == 256).all()
    return [bytes(part[:-1].tolist()).decode() for part in np.split(window, tokens.documents[1:-1])]


def made(texts: Path, out: Path, **settings: Any) -> Built:
    return build([str(texts)], str(out), Recipe(**settings))


def test_a_folder_of_files(texts: Path, tmp_path: Path) -> None:
    built = made(texts, tmp_path / "deeper" / "set")
    assert documents(tmp_path / "deeper" / "set") == [
        "first line\n\nsecond\nparagraph\n",
        "one",
        "zwö",
        "packed",
    ]
    assert (built.files, built.empty, built.card.documents) == (3, 1, 4)
    stream = DataConfig(sources=(Source(path=str(tmp_path / "deeper" / "set")),), split="1").build(seq_len=8)
    assert stream.vocab_size == 257
    assert stream.manifest.eod == 256


def test_what_a_document_of_a_text_file_is(texts: Path, tmp_path: Path) -> None:
    file = texts / "a.txt"
    for kind, expected in (
        ("line", ["first line", "second", "paragraph"]),
        ("paragraph", ["first line", "second\nparagraph"]),
        ("file", ["first line\n\nsecond\nparagraph\n"]),
    ):
        made(file, tmp_path / kind, document=kind)
        assert documents(tmp_path / kind) == expected


def test_the_text_may_lie_inside(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"data": {"body": "here"}}\n')
    made(tmp_path / "x.jsonl", tmp_path / "set", field="data.body")
    assert documents(tmp_path / "set") == ["here"]


@pytest.mark.parametrize(
    ("data", "offset", "what"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', 14, r"x\.jsonl, line 2, byte 14: not JSON"),
        (b'{"text": "a"}\n{"body": "b"}\n', 14, "line 2, byte 14: nothing where the text 'text' is expected"),
        (b'{"text": 3}\n', 0, "line 1, byte 0: a int where the text"),
        (b"[1]\n", 0, "nothing where the"),
        (b'{"text": "\xff"}\n', 0, "line 1, byte 0: not JSON"),
    ],
)
def test_lines_that_are_no_documents(tmp_path: Path, data: bytes, offset: int, what: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=what) as caught:
        made(tmp_path / "x.jsonl", tmp_path / "set")
    assert (caught.value.file, caught.value.offset) == (str(tmp_path / "x.jsonl"), offset)
    assert ("body" in str(caught.value.hint)) == ("nothing where the text 'text'" in what)
    assert os.listdir(tmp_path) == ["x.jsonl"]


def test_inputs_that_are_none(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has no text in it"):
        input_files([str(tmp_path / "empty")])
    with pytest.raises(UsageError, match="nothing is not there"):
        input_files([str(tmp_path / "nothing")])
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"x\.parquet is neither text nor JSON lines"):
        input_files([str(tmp_path / "x.parquet")])
    with pytest.raises(UsageError, match=r"a\.txt is given more than once"):
        input_files([str(texts), str(texts / "a.txt")])
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "cut off"}\n' * 100)[:-20])
    with pytest.raises(DataError, match=r"x\.jsonl\.gz is not a whole gzip file"):
        made(tmp_path / "x.jsonl.gz", tmp_path / "set")
    (tmp_path / "none.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UsageError, match="no text in"):
        made(tmp_path / "none.jsonl", tmp_path / "set")
    assert not list(tmp_path.glob(".tmp*")) + list(tmp_path.glob("set*"))


def test_a_set_is_replaced_only_when_asked(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    made(texts / "a.txt", out)
    with pytest.raises(UsageError, match=r"set\.bin is there already"):
        made(texts / "b.jsonl", out)
    assert documents(out) == ["first line\n\nsecond\nparagraph\n"]
    build([str(texts / "b.jsonl")], str(out), Recipe(), replace=True)
    assert documents(out) == ["one", "zwö"]
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(UsageError, match=r"model\.bin is there already"):
        made(texts, tmp_path / "model")
    assert (tmp_path / "model.bin").read_bytes() == b"weights"


@pytest.mark.usefixtures("armed")
@pytest.mark.parametrize("at", ["data.document:enospc@2", "data.named:eio"])
def test_a_disk_that_fails(texts: Path, tmp_path: Path, at: str) -> None:
    faults.arm(at)
    with pytest.raises(StorageError, match=f"cannot write {tmp_path}/set"):
        made(texts, tmp_path / "set")
    faults.disarm()
    assert not (tmp_path / "set.idx").exists()
    assert not list(tmp_path.glob(".tmp*"))
    build([str(texts)], str(tmp_path / "set"), Recipe(), replace=True)
    assert len(documents(tmp_path / "set")) == 4


@pytest.mark.usefixtures("armed")
@pytest.mark.parametrize("nth", [1, 2])
def test_an_old_index_never_stands_beside_new_tokens(texts: Path, tmp_path: Path, nth: int) -> None:
    made(texts / "a.txt", tmp_path / "set")
    faults.arm(f"data.named:eio@{nth}")
    with pytest.raises(StorageError):
        build([str(texts / "b.jsonl")], str(tmp_path / "set"), Recipe(), replace=True)
    assert not (tmp_path / "set.idx").exists()


@pytest.mark.usefixtures("armed")
def test_a_set_stays_until_the_new_one_is_whole(texts: Path, tmp_path: Path) -> None:
    made(texts / "a.txt", tmp_path / "set")
    faults.arm("data.document:enospc@2")
    with pytest.raises(OutOfSpaceError, match="cannot write") as caught:
        build([str(texts / "b.jsonl")], str(tmp_path / "set"), Recipe(), replace=True)
    assert "make room" in str(caught.value.hint)
    assert documents(tmp_path / "set") == ["first line\n\nsecond\nparagraph\n"]


def test_leftovers_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    (tmp_path / ".tmp-0123456789ab-set.bin").write_bytes(b"left by a killed writer")
    (tmp_path / ".tmp-0123456789ab-other.bin").write_bytes(b"of another set")
    files = Files()
    live = files.create(str(tmp_path / ".tmp-ba9876543210-set.idx"))
    files.lock(live)
    with TokenWriter(str(tmp_path / "set"), ByteTokenizer()) as writer:
        writer.add(np.array([1, 2]))
        writer.finish()
    files.close(live)
    hidden = sorted(name for name in os.listdir(tmp_path) if name.startswith("."))
    assert hidden == [".tmp-0123456789ab-other.bin", ".tmp-ba9876543210-set.idx"]


@pytest.mark.process
def test_a_killed_build_leaves_nothing_to_see(texts: Path, tmp_path: Path) -> None:
    """Killed while it writes, and between any two names. Again, it works, and cleans up."""
    out = tmp_path / "out" / "set"
    command = [
        sys.executable,
        "-m",
        "holdfast.cli",
        "data",
        "build",
        str(texts),
        "--out",
        str(out),
        "--force",
    ]
    for fault in ("data.document:kill@3", "data.named:kill@1", "data.named:kill@2"):
        environment = {**os.environ, faults.ENV: fault}
        done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (out.parent / "set.idx").exists()
        with pytest.raises(DataError, match=r"cannot read .*set\.idx"):
            TokenFiles(str(out))
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(out.parent)) == ["set.bin", "set.idx", "set.json"]
    assert len(documents(out)) == 4


def test_the_commands(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "set"
    done = holdfast("data", "build", texts, "--out", out)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[:4] == [
        f"set          {out}",
        "documents    4",
        "tokens       46 (uint16, 92 B)",
        "length       4 to 30, median 6",
    ]
    assert "made of 3 files" in done.stderr
    assert "left out: 1 document without text" in done.stderr
    told = answer("data", "show", f"{out}.idx", "--verify", "--documents", 2)
    assert told["verified"]
    assert told["beginnings"][1] == {"document": 1, "text": "'one'"}
    shown = holdfast("data", "show", out, "--documents", 1).stdout
    assert "document 0: 'first line\\n\\nsecond\\nparagraph\\n'" in shown
    assert answer("data", "show", "builtin:tiny")["documents"] == 167
    again = holdfast("data", "build", texts, "--out", out)
    assert again.exit_code == 2
    assert again.stderr.startswith(f"error: {out}.bin is there already\n\nhint: choose another name")
    Path(f"{out}.idx").write_bytes(b"MMIDIDX\0\0")
    damaged = holdfast("data", "show", out)
    assert damaged.exit_code == 2
    assert "set.idx, byte 9: ends after 9 bytes, within the header of 34" in damaged.stderr


TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 7,
            "content": "</s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "WordLevel",
        "vocab": {"[UNK]": 0, "one": 1, "two": 2, "three": 4, "</s>": 7},
        "unk_token": "[UNK]",
    },
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(TOKENIZER))
    return file


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library, or what stands in for it: it brings a dozen packages along."""
    if importlib.util.find_spec("tokenizers") is None:
        monkeypatch.setitem(sys.modules, "tokenizers", words)


@pytest.mark.usefixtures("library")
def test_a_tokenizer_of_hugging_face(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "one two"}\n{"text": "three four"}\n')
    built = made(tmp_path / "x.jsonl", tmp_path / "set", tokenizer=str(tokenizer))
    assert (built.card.tokenizer, built.card.vocab_size, built.card.eod) == ("tokenizer.json", 8, 7)
    tokens = TokenFiles(str(tmp_path / "set"))
    window = np.empty(6, tokens.dtype)
    tokens.window(0, window)
    assert window.tolist() == [1, 2, 7, 4, 0, 7]
    assert tokens.documents.tolist() == [0, 3, 6]
    shown = answer("data", "show", tmp_path / "set", "--documents", 1)["beginnings"]
    assert shown == [{"document": 0, "text": "1 2 7"}]
    read = answer("data", "show", tmp_path / "set", "--documents", 1, "--tokenizer", tokenizer)["beginnings"]
    assert read == [{"document": 0, "text": "'one two'"}]
    other = holdfast("data", "show", tmp_path / "set", "--documents", 1, "--tokenizer", "byte")
    assert "was made with 'tokenizer.json', not with 'byte'" in other.stderr
    sources = (Source(path=str(tmp_path / "set")),)
    same = DataConfig(sources=sources, tokenizer=str(tokenizer), split="1").build(seq_len=2)
    assert same.vocab_size == 8
    with pytest.raises(DataError, match=r"was made with 'tokenizer\.json', not with data\.tokenizer 'byte'"):
        DataConfig(sources=sources, tokenizer="byte", split="1").build(seq_len=2)
    mixed = (*sources, Source())
    with pytest.raises(DataError, match="were made with different tokenizers"):
        DataConfig(sources=mixed, split="1").build(seq_len=2)
    (tmp_path / "y.txt").write_bytes(b"one \xff two")
    with pytest.raises(DataError, match=r"y\.txt, byte 4: 0xff is not UTF-8"):
        made(tmp_path / "y.txt", tmp_path / "other", tokenizer=str(tokenizer))
    with pytest.raises(UsageError, match="has no token '<end>'"):
        made(tmp_path / "x.jsonl", tmp_path / "other", tokenizer=str(tokenizer), eod="<end>")
    tokenizer.write_text(json.dumps(TOKENIZER).replace("</s>", "<fin>"))
    with pytest.raises(UsageError, match="has no token that is known to end documents"):
        made(tmp_path / "x.jsonl", tmp_path / "other", tokenizer=str(tokenizer))
    tokenizer.write_text("{}")
    with pytest.raises(UsageError, match=r"is not a tokenizer\.json"):
        made(tmp_path / "x.jsonl", tmp_path / "other", tokenizer=str(tokenizer))


@pytest.mark.usefixtures("library")
def test_the_end_of_a_document_does_not_hang_on_the_order_of_sources(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "one two"}\n{"text": "three four"}\n')
    for end, given in (("a", {}), ("b", {"eod": "one"}), ("none", {"with_eod": False})):
        made(tmp_path / "x.jsonl", tmp_path / end, tokenizer=str(tokenizer), **given)

    def eod(*names: str, **settings: Any) -> int | None:
        sources = tuple(Source(path=str(tmp_path / name)) for name in names)
        stream = DataConfig(sources=sources, split="1", **settings).build(seq_len=2)
        stream.close()
        return stream.manifest.eod

    assert eod("a", "none", loss_on_eod=False) == eod("none", "a", loss_on_eod=False) == 7
    for names in (("a", "b"), ("b", "a")):
        assert eod(*names) is None
        with pytest.raises(DataError, match=r"documents end with token \d in .*, with \d in .*"):
            eod(*names, loss_on_eod=False)


def test_tokenizers_that_cannot_be_had(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(UsageError, match=r"cannot read the tokenizer .*gpt3: No such file"):
        made(tmp_path / "x.txt", tmp_path / "set", tokenizer=str(tmp_path / "gpt3"))
    with pytest.raises(UsageError, match="the byte tokenizer ends documents with id 256"):
        made(tmp_path / "x.txt", tmp_path / "set", eod="</s>")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match="needs the package `tokenizers`") as caught:
        made(tmp_path / "x.txt", tmp_path / "set", tokenizer=str(tokenizer))
    assert "holdfast[data]" in str(caught.value.hint)
    assert not list(tmp_path.glob("set*"))


def test_a_folder_that_cannot_be_listed_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus" / "closed").mkdir(parents=True)
    (tmp_path / "corpus" / "open.txt").write_text("text")
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(StorageError, match="closed: Permission denied"):
        input_files([str(tmp_path / "corpus")])
