"""The public names are a decision: they change here first, and none of them is dead."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import holdfast
from tests.house.rooms import REPO, SRC, built, files, tree

# What each room offers. To change it, change the room's __all__ and this table together; the
# failing test prints the line to put here.
PUBLIC: dict[str, tuple[str, ...]] = {
    "holdfast": (
        "Checkpointer",
        "HoldfastError",
        "SaveHandle",
        "__version__",
        "export_hub",
        "join",
        "load_hub",
        "save_hub",
    ),
    "arrays": (
        "Adapter",
        "ArrayLayout",
        "ArrayPlan",
        "BucketLayout",
        "BucketRules",
        "Bytes1D",
        "Copying",
        "DType",
        "Description",
        "DeviceCopy",
        "FlatArray",
        "FlatTree",
        "Holders",
        "HostMemory",
        "Landing",
        "Layout",
        "Memory",
        "Move",
        "NUMPY",
        "Piece",
        "Placement",
        "Plan",
        "PlanCache",
        "Rename",
        "Selection",
        "Sink",
        "Stager",
        "TABLE",
        "Template",
        "Wanted",
        "adapter_of",
        "adapters",
        "cached_plan",
        "coalesce",
        "cuts",
        "decode_scalar",
        "dtype",
        "encode_scalar",
        "flatten",
        "flatten_tree",
        "join",
        "landed",
        "match",
        "move",
        "plan",
        "split",
        "spread",
        "stored_shape",
        "unflatten",
    ),
    "journal": (
        "AgentLost",
        "BarrierFailed",
        "BarrierLate",
        "BlockBad",
        "BudgetSpent",
        "Cleaned",
        "CoordinatorStarted",
        "CoordinatorStopped",
        "Dropped",
        "StepDone",
        "StepMirrored",
        "MirrorDraining",
        "MirrorFailed",
        "MirrorLeft",
        "LaneDigests",
        "StateReceived",
        "RunRestored",
        "Regrouped",
        "Event",
        "GenerationFormed",
        "Journal",
        "LoadFinished",
        "LoadStarted",
        "MemberLost",
        "MemberRejoined",
        "MemberSuspected",
        "NodeBlamed",
        "NodeLeaving",
        "PartRestarted",
        "PartStarted",
        "Reading",
        "Record",
        "RunEnded",
        "RunGrown",
        "RunShrunk",
        "RunStarted",
        "SaveCaptured",
        "SaveDurable",
        "SaveFailed",
        "SaveSkipped",
        "SaveStaged",
        "SaveStarted",
        "StacksDumped",
        "StagingRoute",
        "StepPoisoned",
        "StepPruned",
        "StepSkipped",
        "StopAgreed",
        "StopAsked",
        "TroubleReported",
        "Unknown",
        "VaultDied",
        "VaultReplaced",
        "VaultStarted",
        "WorkerExited",
        "WorkerFenced",
        "WorkerHung",
        "WorkerLost",
        "WorkerReplaced",
        "WorkerSpawned",
        "follow",
        "read",
    ),
    "wire": (
        "ClientHandshake",
        "ConnectionLost",
        "FrameSocket",
        "FrameSplitter",
        "MAX_HANDSHAKE",
        "NONCE_BYTES",
        "ServerHandshake",
        "framed",
        "refusal",
    ),
    "storage": (
        "ALIGN",
        "Files",
        "Hold",
        "LocalStore",
        "PROBE",
        "PartReader",
        "PartWriter",
        "Store",
        "StoreOptions",
        "TEMPORARY",
        "Upload",
        "Version",
        "is_trouble",
        "is_url",
        "local_path",
        "opened",
    ),
    "coord": (
        "Agreement",
        "AsyncCoordClient",
        "Changed",
        "CoordAgreement",
        "CoordClient",
        "HELLO",
        "Joined",
        "Lost",
        "Met",
        "Overview",
        "Patience",
        "Rally",
        "Settings",
        "SharedFolderAgreement",
        "SoloAgreement",
        "Stop",
        "Swapped",
        "Trouble",
        "check_addresses",
        "serve",
    ),
    "transfer": (
        "Endpoint",
        "Publication",
        "PublishedTree",
        "Shard",
        "Transfer",
        "TransferPlan",
        "TransferResult",
    ),
    "reduce": ("Group", "Member", "Reducer", "SumSettings", "sum_plan"),
    "format": (
        "ALIGN",
        "ArrayEntry",
        "ArrayTable",
        "BLOCK",
        "HEAD",
        "MANIFEST",
        "MAX_HEADER",
        "MAX_INDEX",
        "MAX_MANIFEST",
        "Manifest",
        "PartEntry",
        "PartFile",
        "PartIndex",
        "Piece",
        "Problem",
        "SaveId",
        "ScalarEntry",
        "Slice",
        "Tensor",
        "VERSION",
        "arrays_in",
        "block_digest",
        "block_range",
        "block_seed",
        "cells",
        "check_block",
        "check_digest",
        "check_meta",
        "check_size",
        "check_slice",
        "data_name",
        "decode_header",
        "decode_index",
        "decode_manifest",
        "decode_owners",
        "digest",
        "encode_header",
        "encode_index",
        "encode_manifest",
        "encode_owners",
        "index_name",
        "lay_out",
        "num_blocks",
        "num_cells",
        "owner_array",
        "pack",
        "parse_file_name",
        "parse_step_folder",
        "part_index",
        "read_index",
        "read_manifest",
        "read_some",
        "saved_by",
        "step_folder",
        "verify_step",
        "versions",
    ),
    "vault": (
        "AGREEMENT",
        "Accepted",
        "CoordinatorAt",
        "Crew",
        "Hello",
        "Order",
        "Outcome",
        "Recipe",
        "ServeAt",
        "Slot",
        "ThreadWriter",
        "VaultWriter",
        "WORK",
        "Writer",
        "accepted",
        "copy_from",
        "keep_for_recycling",
        "make_agreement",
        "neighbours",
        "outcome_error",
        "restore",
        "restore_newest",
        "revoke",
        "sweep_fences",
        "withdraw",
        "Copy",
        "MirrorTo",
        "Records",
        "mirrors_of",
        "wanted",
        "Intent",
        "announce",
        "claim",
        "unfence",
        "announced_attempts",
        "attempt_in",
        "dead_attempts",
        "locked_attempts",
    ),
    "checkpoint": (
        "Checkpointer",
        "Lease",
        "LoadReport",
        "Policy",
        "SaveHandle",
        "SaveState",
        "StepInfo",
        "StepReader",
        "best",
        "committed_steps",
        "doomed",
        "each",
        "every",
        "everything",
        "in_flight",
        "latest",
        "leftovers",
        "readable_steps",
        "remove_step",
        "step_info",
        "step_manifest",
        "within",
        "Mirror",
        "Whereabouts",
        "whereabouts",
        "NameMap",
        "Rule",
        "export_hub",
        "load_hub",
        "save_hub",
    ),
    "supervise": ("Run", "Step", "join"),
    "report": ("Goodput", "goodput"),
    "launch": ("Launch", "LaunchSettings", "leave_wish"),
    "jax": ("ADAPTER", "abstract_mesh"),
    "xla": ("Bundle", "Executable", "compiled"),
    "train": ("RunOptions", "TrainConfig", "run_training"),
    "recipes": ("dense_1b", "one_world", "resolve", "small", "tiny"),
    "testing": (
        "AgreementConformance",
        "AgreementProcessConformance",
        "DiskModel",
        "FailingFiles",
        "ForgetfulFiles",
        "Image",
        "MOUNT",
        "MemoryFiles",
        "Op",
        "Promise",
        "RecordingFiles",
        "SCENARIOS",
        "Scenario",
        "Script",
        "SlowFiles",
        "Tally",
        "check_crashes",
        "decode_log",
        "encode_log",
        "overwriting",
        "quiet",
        "read_tree",
        "record",
        "recycling",
        "restart_problem",
        "same",
        "sample_tree",
        "second_save",
        "state_problem",
        "two_ranks",
    ),
    "cli": ("main",),
}

OFFERING = ["holdfast", *built()]
# Names that only tests use are dead, except in what is made for users: users are not in this repo.
FOR_USERS = ("holdfast", "testing")


def offered(room: str) -> list[str]:
    module = importlib.import_module("holdfast" if room == "holdfast" else f"holdfast.{room}")
    names = getattr(module, "__all__", None)
    assert names is not None, f"{room}/__init__.py has no __all__"
    assert len(set(names)) == len(names), f"{room}.__all__ has a name twice"
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing, f"{room}.__all__ names what is not there: {missing}"
    return list(names)


@pytest.mark.parametrize("room", OFFERING)
def test_public_names_are_frozen(room: str) -> None:
    have, want = set(offered(room)), set(PUBLIC.get(room, ()))
    if have != want:
        names = ", ".join(f'"{name}"' for name in sorted(have)) + ("," if len(have) == 1 else "")
        pytest.fail(
            f"the public names of {room} changed\n"
            f"  new:  {sorted(have - want)}\n"
            f"  gone: {sorted(want - have)}\n"
            f"if that is meant, put this into PUBLIC (then run ruff format):\n"
            f'    "{room}": ({names}),',
            pytrace=False,
        )


def test_the_table_lists_only_what_exists() -> None:
    assert not set(PUBLIC) - set(OFFERING)


def test_lazy_names_match_what_type_checkers_see() -> None:
    assert {*holdfast._HOME, "__version__"} == set(holdfast.__all__)
    typed = {
        alias.name: node.module
        for block in ast.walk(tree(SRC / "__init__.py"))
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == holdfast._HOME
    assert dir(holdfast) == sorted(holdfast.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        holdfast.nonsense  # noqa: B018


@pytest.mark.parametrize("room", OFFERING)
def test_no_public_name_is_dead(room: str) -> None:
    unused = [name for name in offered(room) if not name.startswith("__") and dead(room, name)]
    if unused:
        pytest.fail(
            f"public in {room}, used nowhere outside their defining file: {', '.join(unused)}\n"
            f"use them, document them, or take them out of {room}.__all__",
            pytrace=False,
        )


def dead(room: str, name: str) -> bool:
    home = SRC / "__init__.py" if room == "holdfast" else SRC / room / "__init__.py"
    own = {home, *defining(home.parent, name)}
    roots = [REPO / "examples"] + ([REPO / "tests"] if room in FOR_USERS else [])
    sources = [path for root in (SRC, *roots) for path in files(root)]
    house = REPO / "tests" / "house"
    if any(
        name in names_used(path)
        for path in sources
        # Listing a name (another __init__, the table above) is not using it.
        if path not in own and path.name != "__init__.py" and house not in path.parents
    ):
        return False
    return not any(re.search(rf"\b{re.escape(name)}\b", text) for text in prose())


def defining(room: Path, name: str) -> Iterator[Path]:
    """The files of the room that define `name` at their top level."""
    for path in files(room):
        if path.name != "__init__.py" and name in names_defined(path):
            yield path


@cache
def names_defined(path: Path) -> frozenset[str]:
    defined: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined.update(target.id for target in targets if isinstance(target, ast.Name))
    return frozenset(defined)


@cache
def names_used(path: Path) -> frozenset[str]:
    """Names loaded in the file, plain or as attributes; importing alone is not use."""
    used: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            # `from x import name as other`: the use shows under the other name.
            used.update(alias.name for alias in node.names if alias.asname)
    return frozenset(used)


@cache
def prose() -> tuple[str, ...]:
    pages = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
    return tuple(page.read_text(encoding="utf-8") for page in pages if page.exists())


def test_the_dead_name_check_finds_uses_and_definitions() -> None:
    record = SRC / "journal" / "record.py"
    assert list(defining(SRC / "journal", "Record")) == [record]
    assert "Record" in names_used(SRC / "journal" / "reader.py")
    assert "no_such_name" not in names_used(record)
    assert inspect.getsourcefile(importlib.import_module("holdfast.journal.record")) == str(record)
