"""File names: the parser accepts what the builder makes, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import format as fmt
from holdfast.errors import UsageError

FIXED = settings(derandomize=True, deadline=None, max_examples=200)
words = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}", fullmatch=True)
saves = st.builds(fmt.SaveId, words, st.integers(0, 2**63 - 1), words)


@FIXED
@given(saves)
def test_save_ids_round_trip(save: fmt.SaveId) -> None:
    assert fmt.SaveId.parse(str(save)) == save
    assert msgspec.json.decode(msgspec.json.encode(save), type=fmt.SaveId) == save


@pytest.mark.parametrize("word", ["", ".", "..", ".a", "a/b", "a\\b", "a" * 65, "a\n", "é", "a b"])
def test_unsafe_words_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="cannot be part of a file name"):
        fmt.SaveId("run", 1, word)
    with pytest.raises(UsageError):
        fmt.SaveId(word, 1, "a")
    with pytest.raises(UsageError):
        fmt.data_name(0, word)


@pytest.mark.parametrize("step", [-1, 2**63, True, 1.0, "1"])
def test_steps_are_plain_bounded_ints(step: object) -> None:
    with pytest.raises(UsageError, match="step must be an int"):
        fmt.SaveId("run", step, "a")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "run", "run/1", "run/01/a", "run/-1/a", "run/1/a/b", "r/\u0661/a"])
def test_a_save_id_has_one_spelling(text: str) -> None:
    with pytest.raises(UsageError):
        fmt.SaveId.parse(text)


@FIXED
@given(st.integers(0, 2**63 - 1))
def test_step_folders_round_trip(step: int) -> None:
    assert fmt.parse_step_folder(fmt.step_folder(step)) == step


def test_step_folders_sort_and_look_right() -> None:
    assert fmt.step_folder(1200) == "step-00001200"
    assert fmt.step_folder(10**9) == "step-1000000000"


@pytest.mark.parametrize(
    "name",
    ["step-1200", "step-000001200", "step-00001200/", "../step-00001200", "step-00001200\n",
     "step-٠٠٠٠١٢٠٠", "Step-00001200", "step--0000001", f"step-{2**63}", "step-" + "9" * 5000, ""],
)  # fmt: skip
def test_other_folder_names_are_none(name: str) -> None:
    assert fmt.parse_step_folder(name) is None


@FIXED
@given(st.integers(0, (1 << 20) - 1), words, st.integers(0, (1 << 12) - 1))
def test_file_names_round_trip(part: int, attempt: str, file: int) -> None:
    assert fmt.parse_file_name(fmt.data_name(part, attempt, file)) == ("data", attempt, part, file)
    assert fmt.parse_file_name(fmt.index_name(part, attempt)) == ("index", attempt, part, -1)


def test_the_names_of_the_documentation() -> None:
    assert fmt.data_name(3, "a1") == "part-00003.a1.safetensors"
    assert fmt.data_name(3, "a1", 2) == "part-00003-2.a1.safetensors"
    assert fmt.index_name(3, "a1") == "part-00003.a1.index.json"
    assert fmt.parse_file_name("manifest.json") == ("manifest", "", -1, -1)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "part-3.a.safetensors", "part-000003.a.safetensors", "part-00003.safetensors",
     "part-00003..safetensors", "part-00003.a/../b.safetensors", "part-00003.a.safetensors\n",
     "part-00003-0.a.safetensors", "part-00003-01.a.safetensors", "part-00003-1.a.index.json",
     "part-9999999.a.safetensors", "part-00003-4096.a.safetensors", "manifest.json~",
     "manifest.a.pending", "PART-00003.a.safetensors", "part-00003.a.safetensors.tmp"],
)  # fmt: skip
def test_other_file_names_are_none(name: str) -> None:
    assert fmt.parse_file_name(name) is None


@FIXED
@given(st.text(alphabet="part-0123.aindexjsonf/\\\n", max_size=40))
def test_whatever_parses_is_safe_and_canonical(name: str) -> None:
    parsed = fmt.parse_file_name(name)
    if parsed is not None and parsed.kind != "manifest":
        assert "/" not in name
        assert not name.startswith(".")
