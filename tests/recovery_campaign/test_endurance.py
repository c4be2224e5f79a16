"""A hundred recoveries leave no trace in the processes that live through them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery_campaign.endurance import KINDS, as_json, endurance

RECOVERIES = 100


@pytest.mark.full
@pytest.mark.process
@pytest.mark.timeout(880)
def test_a_hundred_recoveries_leave_nothing_behind(tmp_path: Path) -> None:
    found = endurance(tmp_path, recoveries=RECOVERIES)
    (tmp_path / "endurance.json").write_text(as_json(found), encoding="utf-8")
    assert found.code == 75  # stopped, when all was done
    assert (found.wrong_steps, found.left, found.restarted) == ([], [], [])
    assert len(found.samples) == RECOVERIES
    # Launch, agent, coordinator, vault, two workers and one that is parked.
    assert {one.processes for one in found.samples} == {7}
    for kind in KINDS:
        growth = found.growth(kind)
        # A vault has three more while a save is under way.
        assert growth["descriptors"] <= 3, (kind, growth)
        assert growth["threads"] <= 0, (kind, growth)
        assert growth["megabytes"] <= 4.0, (kind, growth)
