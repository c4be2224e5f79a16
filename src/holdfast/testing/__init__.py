"""The public test kit: crashed disks, misbehaving disks, and what an `Agreement` must hold to.

`record` writes down every file operation of a scenario, `check_crashes` runs the real code on what a crash at
any of them may leave. `AgreementConformance` and `AgreementProcessConformance` are classes of tests: derive
from them and supply the factory.
"""

from holdfast.testing.agreement import AgreementConformance
from holdfast.testing.agreement_processes import AgreementProcessConformance
from holdfast.testing.crash import (
    Tally,
    check_crashes,
    quiet,
    read_tree,
    restart_problem,
    state_problem,
)
from holdfast.testing.disk import DiskModel
from holdfast.testing.faulty import FailingFiles, ForgetfulFiles, SlowFiles
from holdfast.testing.memory_disk import MOUNT, Image, MemoryFiles
from holdfast.testing.recording import Op, RecordingFiles, decode_log, encode_log
from holdfast.testing.scenario import (
    SCENARIOS,
    Promise,
    Scenario,
    Script,
    overwriting,
    record,
    recycling,
    same,
    sample_tree,
    second_save,
    two_ranks,
)

__all__ = [
    "MOUNT",
    "SCENARIOS",
    "AgreementConformance",
    "AgreementProcessConformance",
    "DiskModel",
    "FailingFiles",
    "ForgetfulFiles",
    "Image",
    "MemoryFiles",
    "Op",
    "Promise",
    "RecordingFiles",
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
]
