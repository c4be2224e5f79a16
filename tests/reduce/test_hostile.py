"""Peers that break the rules cost themselves the link, and nobody else anything."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final, final

import pytest

from holdfast.reduce import Group, Member, Reducer
from holdfast.reduce.layout import Entry
from holdfast.reduce.messages import (
    Ask,
    Begun,
    Data,
    Done,
    Hello,
    Lend,
    Message,
    Ready,
    Root,
    Shape,
    Share,
    Void,
    Want,
    encoded,
)
from holdfast.transfer.links import address_of
from holdfast.wire import NONCE_BYTES, ClientHandshake, framed
from tests.reduce.crew import DEADLINE_S, Crew, alone, dealt, unchecked

LANES: Final = 4
STRANGER: Final = "f" * 32


@final
class Peer:
    """A peer made of a plain socket, past the handshake."""

    def __init__(self, target: Reducer, *, greet: bool = True) -> None:
        address = address_of("/".join(target.address.split("/")[:3]))
        self.sock = socket.create_connection((address.host, address.port), 5.0)
        shake = ClientHandshake(purpose="reduce", run="run", token=None, nonce=os.urandom(NONCE_BYTES))
        self.sock.sendall(shake.offer())
        (length,) = struct.unpack("<I", self._exactly(4))
        self.sock.sendall(shake.receive(self._exactly(length)))
        if greet:
            self.say(Hello(STRANGER, target.incarnation))

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            data = self.sock.recv(size - len(found))
            assert data
            found += data
        return found

    def say(self, message: Message) -> None:
        self.sock.sendall(encoded(message))

    def ended(self) -> bool:
        """Whether the other end hangs up, within a few seconds."""
        self.sock.settimeout(5.0)
        ends = time.monotonic() + 5.0
        try:
            while time.monotonic() < ends:
                if not self.sock.recv(1 << 16):
                    return True
        except ConnectionError:
            return True
        except TimeoutError:
            pass
        return False


CRIMES: Final[dict[str, Callable[[Peer], None]]] = {
    "a frame without end": lambda peer: peer.sock.sendall(struct.pack("<I", 1 << 31)),
    "a damaged frame": lambda peer: peer.sock.sendall(framed(b"12345678 not that")),
    "no message": lambda peer: peer.sock.sendall(encoded(Done(1))[:4] + b"\0" * 99),
    "a second greeting": lambda peer: peer.say(Hello(STRANGER, "me")),
    "a bank without its descriptor": lambda peer: peer.say(Lend(0, 4096)),
}


@pytest.mark.parametrize("crime", CRIMES.values(), ids=CRIMES)
def test_whoever_breaks_the_rules_is_cut_off(crime: Callable[[Peer], None]) -> None:
    with Crew(2, num_lanes=LANES) as crew:
        crew.step(0, dealt(LANES, range(2)))
        peer = Peer(crew.members[0])
        crime(peer)
        assert peer.ended()
        peer.sock.close()
        assert set(crew.step(1, dealt(LANES, range(2))).values()) == {alone(1, LANES)}


def test_who_means_another_life_is_turned_away() -> None:
    with Crew(2, num_lanes=LANES) as crew:
        peer = Peer(crew.members[0], greet=False)
        peer.say(Hello(STRANGER, "0" * 32))
        assert peer.ended()
        peer.sock.close()


def test_a_stranger_can_say_what_it_likes_about_any_step() -> None:
    """It has the right run, but is no member: what it says is never looked up."""
    with Crew(2, num_lanes=LANES) as crew:
        crew.step(0, dealt(LANES, range(2)))
        peer = Peer(crew.members[0])
        said: list[Any] = [
            Shape((Entry("w", "float32", (1 << 60,)),), None, LANES, b""),
            Begun(1, 1),
            Ready(1, 1, "", 0, (Root(0, LANES, 0, 1),)),
            Share(1, 1, 999, 1),
            Done(1 << 60),
            Want(7, 0),
            Ask(8, 10_000, 1, 0, 1 << 30),
            Ask(9, 0, 0, 5, 3),
            Data(3, 0, memoryview(b"nobody asked")),
            Void(12),
        ]
        for message in said:
            peer.say(message)
        assert set(crew.step(1, dealt(LANES, range(2))).values()) == {alone(1, LANES)}
        peer.sock.close()


def test_a_member_whose_notices_are_lies_is_named() -> None:
    """A member announces sums of a bank that it never lent: an error, and no sum is made of it."""
    reducer = Reducer(num_lanes=2, transports=("tcp",))
    try:
        group = (Member(0, reducer.incarnation, reducer.address), Member(1, STRANGER, "127.0.0.1:1"))
        reducer.regroup(Group(1, 0, group))
        peer = Peer(reducer)
        reducer.begin(0, {0: [0], 1: [1]})
        reducer.add(0, {"w": 1.0})
        peer.say(Ready(1, 0, "another layout", 0, (Root(1, 2, 400, 1),)))
        with pytest.raises(ValueError, match="the arrays differ"):
            reducer.exchange(DEADLINE_S, unchecked)
        assert reducer.decided == -1
        peer.sock.close()
    finally:
        reducer.close()
