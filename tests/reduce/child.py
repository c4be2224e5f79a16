"""A process with one member; it obeys orders on standard input, one JSON object a line, and answers each."""

from __future__ import annotations

import json
import sys
from typing import Any, final

import xxhash

from holdfast.errors import HoldfastError
from holdfast.reduce import Group, Member, Reducer
from tests.reduce.crew import flat, grads, unchecked


@final
class Obedient:
    """The member."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._size = about.pop("size")
        self._reducer = Reducer(**about)

    def opened(self) -> dict[str, Any]:
        return {"incarnation": self._reducer.incarnation, "address": self._reducer.address}

    def regroup(self, order: dict[str, Any]) -> dict[str, Any]:
        members = tuple(Member(*member) for member in order["members"])
        self._reducer.regroup(Group(order["generation"], order["me"], members))
        return self._said()

    def step(self, order: dict[str, Any]) -> dict[str, Any]:
        """A whole step, or what is left of one after a regroup."""
        lanes = {int(slot): mine for slot, mine in order["lanes"].items()}
        if order["anew"]:
            self._reducer.begin(order["step"], lanes)
        else:
            self._reducer.reassign(lanes)
        for lane in lanes.get(order["me"], ()):
            if lane not in self._reducer.held():
                self._reducer.add(lane, grads(order["step"], lane, size=self._size))
        self._reducer.exchange(order["deadline_s"], unchecked)
        return self._said()

    def fetch(self, order: dict[str, Any]) -> dict[str, Any]:
        template = grads(order["step"], 0, size=self._size)
        self._reducer.fetch(order["step"], order["slot"], order["deadline_s"], template)
        return self._said()

    def _said(self) -> dict[str, Any]:
        decided = self._reducer.decided
        digest = "" if decided < 0 else xxhash.xxh3_128_hexdigest(flat(self._reducer.total()))
        return {"decided": decided, "digest": digest, "held": self._reducer.held()}


def main() -> None:
    """Obey until the input ends."""
    member = Obedient(json.loads(sys.argv[1]))
    print(json.dumps({"saw": "up", **member.opened()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            said = {"saw": "done", **getattr(member, order["do"])(order)}
        except HoldfastError as error:
            slots = getattr(error, "slots", ())
            said = {"saw": "error", "kind": type(error).__name__, "slots": slots, "text": str(error)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
