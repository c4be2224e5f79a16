"""Which coordination services there are: the pure core of the host of worlds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.jax.hosting import Effect, Hosting, Start, Stop, World

A0, A1, B0 = World(0, 0), World(0, 1), World(1, 0)


def host() -> Hosting:
    return Hosting(node=0, linger_s=2.0)


def want(world: World, node: int = 0, workers: int = 2) -> tuple[str, bytes | None]:
    return world.want(node), b"%d" % workers


def inside(world: World, index: int) -> tuple[str, bytes | None]:
    return world.inside(index), b""


def gone(key: str) -> tuple[str, bytes | None]:
    return key, None


def test_a_want_is_served_once() -> None:
    hosting = host()
    assert hosting.changed([want(A0)], True, 0.0) == [Start(A0, 2)]
    assert hosting.changed([want(A0)], True, 1.0) == []
    assert hosting.changed([want(B0, workers=4)], False, 1.0) == [Start(B0, 4)]


def test_wants_for_other_nodes_and_strange_keys_are_not_ours() -> None:
    keys: list[tuple[str, bytes | None]] = [
        want(A0, node=1),
        ("world/want/0/x/1", b"2"),
        ("world/want/0/1", b"2"),
        ("world/want/0/0/0", b"many"),
        ("world/at/0/0", b"unix:/x"),
        ("world/left/0/0", b"1"),
    ]
    assert host().changed(keys, True, 0.0) == []


def test_a_superseded_service_ends_when_nobody_is_in_it() -> None:
    hosting = host()
    hosting.changed([want(A0), inside(A0, 0), inside(A0, 1)], True, 0.0)
    assert hosting.changed([want(A1)], False, 10.0) == [Start(A1, 2)]
    assert hosting.next_due() == 12.0
    assert hosting.changed([gone(A0.inside(0))], False, 10.1) == []
    assert hosting.changed([gone(A0.inside(1))], False, 10.2) == [Stop(A0)]
    assert hosting.next_due() is None
    assert hosting.running == (A1,)


def test_whoever_stays_in_a_superseded_world_is_not_waited_for_long() -> None:
    hosting = host()
    hosting.changed([want(A0), inside(A0, 0)], True, 0.0)
    hosting.changed([want(A1)], False, 10.0)
    assert hosting.due(11.9) == []
    assert hosting.due(12.0) == [Stop(A0)]


def test_the_newest_world_is_never_closed_even_if_nobody_seems_to_be_in_it() -> None:
    """Keys vanish when the coordinator forgets sessions; workers may live on: a close would abort them."""
    hosting = host()
    hosting.changed([want(A0), inside(A0, 0)], True, 0.0)
    assert hosting.changed([want(A0)], True, 1.0) == []
    assert hosting.due(1000.0) == []
    assert hosting.changed([], True, 1001.0) == []
    assert hosting.due(2000.0) == []
    assert hosting.running == (A0,)


def test_a_want_taken_back_ends_the_world_once_empty() -> None:
    hosting = host()
    hosting.changed([want(A0), inside(A0, 1)], True, 0.0)
    assert hosting.changed([gone(A0.want(0))], False, 1.0) == []
    assert hosting.changed([gone(A0.inside(1))], False, 1.1) == [Stop(A0)]


def test_an_old_attempt_comes_too_late() -> None:
    hosting = host()
    assert hosting.changed([want(A1), want(A0)], True, 0.0) == [Start(A1, 2)]
    assert hosting.changed([want(A0)], False, 1.0) == []


def test_what_failed_to_start_is_tried_again() -> None:
    hosting = host()
    hosting.changed([want(A0)], True, 0.0)
    hosting.failed(A0)
    assert hosting.due(1.0) == [Start(A0, 2)]


WORLDS = st.builds(World, st.integers(0, 1), st.integers(0, 3))
CHANGES = st.one_of(
    st.builds(want, WORLDS),
    st.builds(lambda world: gone(world.want(0)), WORLDS),
    st.builds(inside, WORLDS, st.integers(0, 1)),
    st.builds(lambda world, index: gone(world.inside(index)), WORLDS, st.integers(0, 1)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.lists(CHANGES, max_size=3), st.booleans(), st.floats(0.0, 3.0)), max_size=20))
def test_services_match_their_starts_and_stops(
    story: list[tuple[list[tuple[str, bytes | None]], bool, float]],
) -> None:
    """Each runs once; the newest one wanted runs; superseded ones end within the linger time."""
    hosting, now = host(), 0.0
    running: dict[World, float] = {}
    wanted: set[World] = set()
    for items, reset, passed in story:
        now += passed
        wanted = wanted & set(running) if reset else wanted
        for key, value in items:
            parts = key.split("/")
            if parts[1] == "want":
                world = World(int(parts[3]), int(parts[4]))
                (wanted.discard if value is None else wanted.add)(world)
        effects: list[Effect] = hosting.changed(items, reset, now)
        for effect in effects:
            if isinstance(effect, Start):
                assert effect.world not in running
                running[effect.world] = now
            else:
                del running[effect.world]
        assert set(hosting.running) == set(running)
        newest = {max((w for w in wanted if w.replica == r), default=None) for r in (0, 1)} - {None}
        assert newest <= set(running)
        for effect in effects:
            assert not (isinstance(effect, Stop) and effect.world in newest)
    for effect in hosting.due(now) + hosting.due(now + 2.0):
        assert isinstance(effect, Stop)
        del running[effect.world]
    assert len(running) <= 2
