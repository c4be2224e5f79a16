"""What is said about the cost of sums before a run is what an exchange then moves."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from holdfast.errors import UsageError
from holdfast.reduce import Reducer, SumSettings, sum_plan
from holdfast.reduce.layout import BLOCK
from holdfast.reduce.links import Link
from tests.cli.saved import holdfast
from tests.reduce.crew import DEADLINE_S, Crew, unchecked


def settings(**changes: Any) -> SumSettings:
    return SumSettings(
        **{"gradient_bytes": {"float32": 4_000_000_000}, "lane_s": 0.5, "host_bytes_s": 4e9, **changes}
    )


def test_eight_lanes_on_seven_replicas_take_1_75_times_the_ideal_and_it_is_said() -> None:
    plan = sum_plan(settings(lanes=8, replicas=8))
    assert plan.whole.most_lanes == 1
    assert plan.whole.vs_ideal == 1.0
    assert plan.after_loss is not None
    assert (plan.after_loss.replicas, plan.after_loss.most_lanes) == (7, 2)
    assert plan.after_loss.vs_ideal == 1.75
    assert plan.after_loss.compute_s == 2 * plan.whole.compute_s
    said = "\n".join(plan.lines())
    assert "8 lanes on 7 replicas, after losing one: the slowest computes 2 of them, 1.75x the ideal" in said
    assert "32 smaller lanes would be nearer to it" in said
    finer = sum_plan(settings(lanes=32, replicas=8, lane_s=0.125))
    assert finer.after_loss is not None
    assert finer.after_loss.vs_ideal == pytest.approx(35 / 32)


@pytest.mark.parametrize("num_members", [2, 3, 4])
def test_the_bytes_are_those_that_an_exchange_asks_for(
    num_members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, lanes = 12, 8
    received: Counter[int] = Counter()
    ask = Link.ask

    def counted(self: Link, bank: int, epoch: int, wanted: range, into: Any) -> Any:
        received[id(self._shelf)] += len(wanted) * BLOCK  # one shelf for all links of a member
        return ask(self, bank, epoch, wanted, into)

    monkeypatch.setattr(Link, "ask", counted)
    tree = {"w": np.ones(blocks * BLOCK // 4, np.float32)}
    size, extra = divmod(lanes, num_members)
    cuts = [at * size + min(at, extra) for at in range(num_members + 1)]
    deal = {slot: range(cuts[slot], cuts[slot + 1]) for slot in range(num_members)}

    def exchange(reducer: Reducer) -> None:
        reducer.exchange(DEADLINE_S, unchecked)

    with Crew(num_members, num_lanes=lanes, transports=("tcp",)) as crew:
        for slot, reducer in crew.members.items():
            reducer.begin(0, deal)
            for lane in deal[slot]:
                reducer.add(lane, tree)
        assert set(crew.together(exchange).values()) == {None}
    plan = sum_plan(
        SumSettings(
            gradient_bytes={"float32": blocks * BLOCK},
            lanes=lanes,
            replicas=num_members,
            hosts=num_members,
            lane_s=1.0,
            link_bytes_s=1e9,
        )
    )
    # What the busiest sends may be more than what the busiest receives, which is what is counted here.
    assert len(received) == num_members
    assert max(received.values()) <= plan.host_bytes <= 2 * max(received.values())
    if num_members in (2, 4):  # all alike
        assert set(received.values()) == {plan.host_bytes}


def test_each_worker_of_a_replica_sends_its_own_shard_only() -> None:
    one = sum_plan(settings(replicas=2, hosts=2, link_bytes_s=1e9))
    four = sum_plan(settings(replicas=2, workers_per_replica=4, hosts=2, link_bytes_s=1e9))
    spread = sum_plan(settings(replicas=2, workers_per_replica=4, hosts=8, link_bytes_s=1e9))
    assert one.host_bytes == four.host_bytes == 4_000_000_000  # half of the root out, half of the total out
    assert spread.host_bytes == one.host_bytes // 4
    assert spread.whole.exposed_s < four.whole.exposed_s < one.whole.exposed_s


def test_a_narrower_dtype_on_the_wire_halves_what_is_a_float() -> None:
    mixed = {"float32": 1000, "int32": 100, "bfloat16": 10}
    assert settings(gradient_bytes=mixed).wire_bytes == 1110
    assert settings(gradient_bytes=mixed, wire_dtype="bfloat16").wire_bytes == 610


def test_one_world_is_advised_where_failures_are_rarer_than_sums_are_dear() -> None:
    dear = sum_plan(settings(replicas=2, lane_s=0.01, replace_s=60.0))
    cheap = sum_plan(settings(replicas=2, lane_s=10.0, replace_s=60.0))
    assert dear.break_even_s < 100 < 300 < cheap.break_even_s
    share = cheap.whole.exposed_s / cheap.whole.step_s
    assert cheap.break_even_s == pytest.approx(60.0 / share)
    assert "One world, whose sums are XLA's, is faster where failures come less often" in cheap.lines()[-1]
    alone = sum_plan(settings(replicas=1))
    assert (alone.whole.exposed_s, alone.host_bytes, alone.slowdown) == (0.0, 0, 1.0)
    assert alone.break_even_s == math.inf
    assert alone.after_loss is None
    assert "one replica" in alone.lines()[-1]
    # One that is left of two goes on in lanes, and folds all of them.
    left = sum_plan(settings(replicas=2)).after_loss
    assert left is not None
    assert left.exposed_s == pytest.approx(8 + 1)


def test_device_copies_and_the_link_add_to_what_is_exposed() -> None:
    bare = sum_plan(settings(replicas=2)).whole.exposed_s
    # 4 lanes out of the device and the total in again.
    assert sum_plan(settings(replicas=2, device_bytes_s=4e9)).whole.exposed_s == pytest.approx(bare + 5.0)
    linked = sum_plan(settings(replicas=2, hosts=2, link_bytes_s=4e9)).whole.exposed_s
    assert linked == pytest.approx(bare + 1.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lanes": 0}, "lanes=0 is less than 1"),
        ({"lane_s": 0.0}, "lane_s=0 is not above 0"),
        ({"lane_s": math.nan}, "lane_s=nan is not above 0"),
        ({"replicas": 9}, "replicas=9 is more than lanes=8"),
        ({"hosts": 2, "replicas": 2}, "link_bytes_s is not given"),
        ({"hosts": 3, "replicas": 2, "link_bytes_s": 1e9}, "hosts=3 is more than there are workers"),
        ({"gradient_bytes": {"float32": -1}}, "float32: -1 bytes"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings(**changes)


def test_the_command_says_it_to_people_and_to_machines() -> None:
    words = ("sums", "float32=3.8GB", "int32=1KiB", "--replicas", "8", "--hosts", "8", "--lane-s", "0.5")
    shown = holdfast(*words, "--link", "12.5GB")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "8 lanes on 7 replicas, after losing one" in shown.stdout
    found = json.loads(holdfast(*words, "--link", "12.5GB", "--json").stdout)
    assert found["wire_bytes"] == 3_800_001_024
    assert found["after_loss"]["vs_ideal"] == 1.75
    assert found["slowdown"] > 1
    assert (
        json.loads(holdfast(*words[:2], *words[-2:], "--replicas", "1", "--json").stdout)["break_even_s"]
        is None
    )
    for wrong, said in (
        (("sums", "float32", "--lane-s", "1"), "'float32' is not DTYPE=SIZE"),
        (("sums", "float32=x", "--lane-s", "1"), "'x' is no size"),
        (("sums", "float33=1", "--lane-s", "1"), "float33"),
        (words, "link_bytes_s is not given"),
    ):
        done = holdfast(*wrong)
        assert (done.exit_code, done.stdout) == (2, "")
        assert said in done.stderr
