"""Settings from the command line: typed by their field, and every mistake at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from holdfast.errors import ConfigError
from holdfast.train.overrides import from_mapping, override, settings_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    size: int = 26
    spokes: tuple[int, ...] = (32,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bicycle:
    name: str = "red"
    weight: float = 9.5
    geared: bool = True
    limit: int | None = None
    kind: Literal["road", "gravel"] = "road"
    labels: tuple[str, ...] = ()
    front: Wheel = field(default_factory=Wheel)
    others: tuple[Wheel, ...] = (Wheel(size=20), Wheel(size=24))


@pytest.mark.parametrize(
    ("given", "path", "value"),
    [
        ("name=blue", "name", "blue"),
        ("name=64", "name", "64"),
        ('name="0:1 2:3"', "name", "0:1 2:3"),
        ("name=0:1 2:3", "name", "0:1 2:3"),
        ("name=", "name", ""),
        ("name=a=b", "name", "a=b"),
        ("weight=8", "weight", 8.0),
        ("weight=1e-3", "weight", 1e-3),
        ("geared=false", "geared", False),
        ("geared=False", "geared", False),
        ("limit=1.5K", "limit", 1500),
        ("limit=null", "limit", None),
        ("limit=None", "limit", None),
        ("kind=gravel", "kind", "gravel"),
        ("labels=a,b", "labels", ("a", "b")),
        ('labels=["a"]', "labels", ("a",)),
        ("labels=", "labels", ()),
        ("front.size=28", "front.size", 28),
        ("front.size=-3", "front.size", -3),
        ("front.spokes=20,24", "front.spokes", (20, 24)),
    ],
)
def test_a_value_has_the_type_of_its_field(given: str, path: str, value: object) -> None:
    changed = override(Bicycle(), [given])
    assert settings_of(changed)[path] == value
    assert type(settings_of(changed)[path]) is type(value)


def test_lists_are_reached_by_number_or_given_whole() -> None:
    assert override(Bicycle(), ["others[1].size=29"]).others == (Wheel(size=20), Wheel(size=29))
    assert override(Bicycle(), ['others=[{"size": 5}]']).others == (Wheel(size=5),)


def test_the_last_of_several_holds() -> None:
    assert override(Bicycle(), ["front.size=1", "front.size=2"]).front.size == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("nmae=x", "nmae is no setting; did you mean name?"),
        ("front.sise=3", "front.sise is no setting; did you mean front.size?"),
        ("fornt.size=3", "did you mean front.size?"),
        ("front.q=3", "front has size, spokes"),
        ("q=3", "there are front, geared"),
        ("front=3", "front is a group of settings; name one of them: front.size=VALUE"),
        ("name.first=3", "name.first goes too deep"),
        ("front", "front has no value; write front=VALUE"),
        ("front.size=big", "front.size cannot be 'big'"),
        ("front.size=1.5", "not a whole number"),
        ("front.size=true", "front.size cannot be 'true'"),
        ("geared=maybe", "geared cannot be 'maybe'; expected bool"),
        ("kind=mountain", "kind cannot be 'mountain'"),
        ("weight=heavy", "weight cannot be 'heavy'; expected float"),
        ("others[2].size=1", "there are 2, counted from 0"),
        ("name[0].x=1", "it is no list"),
        ("others[0]=1", "write NAME[0].SETTING=VALUE"),
        ('others=[{"size":1},{"sise":2}]', "others[1].sise is no setting; did you mean others[1].size?"),
        ("front.spokes[0].x=1", "32 has no settings of its own; give the whole list: front.spokes=A,B"),
    ],
)
def test_a_mistake_says_what_would_be_right(given: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        override(Bicycle(), [given])
    assert len(error.value.problems) == 1
    assert says in error.value.problems[0]


def test_all_mistakes_at_once_and_nothing_changed() -> None:
    with pytest.raises(ConfigError, match="3 mistakes") as error:
        override(Bicycle(), ["nmae=x", "front.size=28", "weight=heavy", "front"])
    assert [problem.split()[0] for problem in error.value.problems] == ["nmae", "weight", "front"]


def test_mappings() -> None:
    changed = override(Bicycle(), ["front.size=28", "limit=3"])
    assert from_mapping(Bicycle, {"front": {"size": 28}, "limit": 3}) == changed
    with pytest.raises(ConfigError, match=r"front\.size does not fit"):
        from_mapping(Bicycle, {"front": {"size": "x"}})


def test_every_name_in_a_mapping_is_a_setting() -> None:
    with pytest.raises(ConfigError, match="3 mistakes") as error:
        from_mapping(Bicycle, {"nmae": "x", "front": {"sise": 3}, "others": [{}, {"spoke": [1]}]})
    assert [problem.split(";")[1].strip() for problem in error.value.problems] == [
        "did you mean name?",
        "did you mean front.size?",
        "did you mean others[1].spokes?",
    ]
