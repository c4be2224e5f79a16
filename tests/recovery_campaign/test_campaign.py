"""Minutes of random faults, to every kind of process of a run, change nothing but the time it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery_campaign.campaign import campaign

GAP_S = 20.0
"""Between two steps, on a machine that is busy: an agent that is stopped takes its node with it, which is
found after five seconds, and all processes start anew, on two cores."""


@pytest.mark.full
@pytest.mark.process
@pytest.mark.timeout(880)
@pytest.mark.parametrize(
    ("seed", "seconds", "mean_s", "least"), [(1, 60.0, 5.0, 4), (2, 600.0, 10.0, 30)], ids=["one", "ten"]
)
def test_random_faults_change_nothing_but_the_time(
    tmp_path: Path, seed: int, seconds: float, mean_s: float, least: int
) -> None:
    found = campaign(tmp_path, seconds=seconds, seed=seed, mean_s=mean_s)
    print(found)
    assert found.code == 0, found
    assert found.digest == found.expected, found
    assert found.left == [], found
    assert found.longest_gap_s < GAP_S, found
    assert sum(found.faults.values()) >= least, found
    for kind, (descriptors, threads, megabytes) in found.growth.items():
        assert descriptors <= 10, (kind, found)
        assert threads <= 5, (kind, found)
        assert megabytes <= 20.0, (kind, found)
