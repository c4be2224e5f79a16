"""The demo does what it shows, every listing of the documentation runs, and what it names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.pages import listings

REPO = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "docs/tutorial.md",
    "docs/guides/supervision.md",
    "docs/guides/checkpoints.md",
    "docs/guides/gpu-checkpoints.md",
    "docs/guides/object-stores.md",
    "docs/guides/moving-over.md",
    "docs/guides/hugging-face.md",
    "docs/guides/coordination.md",
    "docs/guides/transfers.md",
    "docs/guides/training/data.md",
    "docs/guides/training/parallelism.md",
    "docs/guides/training/recipes.md",
]


def python(*arguments: str | Path, cwd: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program of this repository as a user would, without the settings of the test process."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["JAX_PLATFORMS"] = "cpu"
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.full
@pytest.mark.process
@pytest.mark.timeout(300)
def test_demo_is_killed_stopped_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "demo-old").mkdir()
    done = python(REPO / "examples" / "demo.py", "--runs", tmp_path, cwd=REPO, timeout_s=290)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "final state equals the undisturbed run: yes" in done.stdout, done.stdout
    for row in ("SIGKILL to replica 1", "SIGSTOP to replica 2"):
        assert re.search(rf"{row} +\d+ +\d+\.\d\d s +\d+\.\d\d s +\d+\.\d\d s", done.stdout), done.stdout
    assert re.search(r"SIGKILL to the coordinator +\d+ .*never left", done.stdout), done.stdout
    (folder,) = tmp_path.iterdir()  # and what an earlier demo left is gone
    marks = [mark_of(path) for path in Path("/proc").glob("[0-9]*/environ")]
    assert not [mark for mark in marks if str(folder) in mark]  # nothing of it runs

    journal = folder / "disturbed" / "journal.jsonl"
    drawn = python(REPO / "docs" / "pictures" / "timeline.py", journal, cwd=REPO, timeout_s=60)
    assert drawn.returncode == 0, drawn.stderr
    titles = re.findall(r'class="t"[^>]*>([^<]+)<', drawn.stdout)
    assert titles == [
        "Slot 1 is killed (SIGKILL)",
        "Slot 2 is stopped (SIGSTOP)",
        "The coordinator is killed",
    ]


def mark_of(environ: Path) -> str:
    """The run folder of a process of a run; empty for all others."""
    try:
        found = re.search(rb"(?:^|\0)HOLDFAST_FOLDER=([^\0]*)", environ.read_bytes())
    except OSError:
        return ""
    return found[1].decode(errors="replace") if found else ""


@pytest.mark.full
@pytest.mark.process
@pytest.mark.timeout(180)
def test_a_trainer_killed_in_a_save_ends_in_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "killed-save-old").mkdir()
    done = python(REPO / "examples" / "killed_save.py", "--runs", tmp_path, cwd=REPO, timeout_s=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"identical +yes", done.stdout), done.stdout
    assert re.search(r"resumed from +step 16", done.stdout), done.stdout
    (folder,) = tmp_path.iterdir()  # and what an earlier one left is gone
    assert (folder / "ckpt" / "step-00000032" / "manifest.json").exists()


@pytest.mark.full
@pytest.mark.process
def test_weight_sync_survives_the_death_of_an_engine(tmp_path: Path) -> None:
    done = python(REPO / "examples" / "weight_sync.py", cwd=tmp_path, timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical: yes" in done.stdout, done.stdout
    assert re.search(r"engine 4 +\d+ versions \(\d+\.\.50\).* all bits right", done.stdout), done.stdout
    assert re.search(r"engine 2×2 \(replaced\) .*all bits right", done.stdout), done.stdout


@pytest.mark.process
@pytest.mark.parametrize("page", PAGES)
def test_listings_of_the_page_run(page: str, tmp_path: Path) -> None:
    done = python(REPO / "tests" / "examples" / "pages.py", REPO / page, cwd=tmp_path, timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_has_its_listing_on_the_first_screen() -> None:
    (listing,) = (one for one in listings(REPO / "README.md") if one.kind == "python")
    assert listing.line < 25


def test_train_is_short_enough_to_read() -> None:
    assert len((REPO / "examples" / "train.py").read_text().splitlines()) < 120


def test_links_between_pages_lead_somewhere() -> None:
    pages = [REPO / "README.md", *(REPO / "docs").rglob("*.md")]
    missing = [
        f"{page.relative_to(REPO)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not missing, missing
