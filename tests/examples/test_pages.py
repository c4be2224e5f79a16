"""What the documentation says of messages, events and tests is so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from holdfast.cli.launch import launch
from holdfast.supervise.board import Reading
from holdfast.supervise.messages import AGENT_LOST, CRASHED, FENCED, HUNG, OUT_OF_MEMORY
from holdfast.supervise.rules import ALLOWANCES, PART, PolicySettings
from holdfast.supervise.watch import Deadlines
from tests.examples.pages import listings

REPO = Path(__file__).resolve().parents[2]
SOURCE = REPO / "src" / "holdfast"
SAYING = ("say", "stop", "warning", "error")


def plain(path: Path) -> str:
    return re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))


def messages() -> Iterator[tuple[str, str]]:
    """The longest fixed part of every message of supervision to people, and where it is said."""
    for path in sorted([*(SOURCE / "supervise").glob("*.py"), *(SOURCE / "launch").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in SAYING:
                continue
            parts = [
                part.strip(" []")
                for argument in node.args
                for one in ast.walk(argument)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
                for part in re.split(r"%\w", one.value)
            ]
            if parts and len(longest := max(parts, key=len)) > 7:
                yield longest, f"{path.name}:{node.lineno}"


def test_operations_has_every_message() -> None:
    page = plain(REPO / "docs" / "operations.md")
    found = list(messages())
    assert len(found) > 30
    # What follows a colon says more and differs from case to case.
    missing = [f"{where}: {text}" for text, where in found if text.partition(": ")[0].rstrip(":") not in page]
    assert not missing, missing


def test_the_deadlines_of_the_guide_are_those_of_the_code() -> None:
    text, deadlines = plain(REPO / "docs" / "guides" / "supervision.md"), Deadlines()

    def limit(phase: str, *, num_steps: int = 9, median_s: float = 0.0) -> float | None:
        return deadlines.of(Reading(0, phase, 0.0, 0.0, "", median_s, num_steps))

    rows = re.findall(r"\| ([^|]+) \| ([\d,]+) s(?: each)? \| (?:by itself|`with)", text)
    for phases, seconds in rows:
        for phase in phases.split(", "):
            assert limit(phase.removeprefix("or ")) == float(seconds.replace(",", "")), phases
    assert len(rows) == 5
    assert limit("step") == 10.0
    assert limit("step", median_s=3.0) == 30.0
    assert limit("step", num_steps=2) == 60.0
    assert limit("parked") is None
    assert (deadlines.stopped_s, deadlines.stall_s, deadlines.stall_cpu_s) == (1.0, 60.0, 0.1)


def test_the_budgets_of_the_guide_are_those_of_the_code() -> None:
    text, rules = plain(REPO / "docs" / "guides" / "supervision.md"), PolicySettings()
    limits = {cause: rules.allowance(cause).limit for cause in ALLOWANCES}
    said = (
        f"crash {limits[CRASHED]} times, be cut off from the coordinator {limits[FENCED]} times and hang "
        f"{limits[HUNG]} times, run out of memory {limits[OUT_OF_MEMORY]} times; a node's agent may be "
        f"lost {limits[AGENT_LOST]} times, a part (vault, coordinator) {limits[PART]} times"
    )
    assert said in text
    assert (rules.progress_steps, rules.poison_failures, rules.lemon_blames) == (3, 3, 4)


def test_the_journal_page_has_every_event() -> None:
    page = plain(REPO / "docs" / "reference" / "journal.md")
    tree = ast.parse((SOURCE / "journal" / "events.py").read_text(encoding="utf-8"))
    kinds = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "_Event" for base in node.bases)
    ]
    assert len(kinds) > 40
    assert not [kind for kind in kinds if f"`{kind}`" not in page]


def test_tests_that_pages_name_exist() -> None:
    known: set[str] = set()
    for path in (REPO / "tests").rglob("*.py"):
        known.add(path.stem)
        known.update(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")))
    missing = [
        f"{page.relative_to(REPO)}: {name}"
        for page in (REPO / "docs").rglob("*.md")
        for name in re.findall(r"\btest_\w+", page.read_text(encoding="utf-8"))
        if name not in known
    ]
    assert not missing, missing


def test_listings_of_the_launch_command_use_its_options() -> None:
    known = {option for parameter in launch.params for option in parameter.opts}
    wrong = []
    for page in [REPO / "README.md", *(REPO / "docs").rglob("*.md")]:
        for listing in listings(page):
            for line in re.findall(r"holdfast launch ([^\n`]*)", listing.text):
                before_script = re.split(r"\S+\.py", line)[0]
                given = re.findall(r"--[\w-]+", before_script)
                wrong += [f"{page.name}: {one}" for one in given if one not in known]
    assert not wrong, wrong
