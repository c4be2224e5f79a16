"""Streams give what was sent, in order; their end is an event; nobody is held up by the other side."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest

from holdfast.errors import DeadlineError, HoldfastError
from holdfast.supervise.messages import Active, Kill, Leave, Seat, Spawn, Take, Waiting, Word
from holdfast.supervise.stream import Stream, commands_of, orders_of, reports_of, words_of
from holdfast.wire import ConnectionLost


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    agent, worker = words_of(ends[0]), orders_of(ends[1])
    worker.send(Waiting())
    worker.send(Active("abc", 3, 1))
    assert agent.take() == [Waiting(), Active("abc", 3, 1)]
    agent.send(Take(Seat(1, 0, 2), 3, 1, 8))
    assert worker.receive(5.0) == Take(Seat(1, 0, 2), 3, 1, 8)
    assert agent.take() == []


def test_commands_arrive(ends: tuple[socket.socket, socket.socket]) -> None:
    conductor, agent = reports_of(ends[0]), commands_of(ends[1])
    conductor.send(Spawn(4))
    conductor.send(Kill(4, "because"))
    assert agent.take() == [Spawn(4), Kill(4, "because")]


def test_a_wait_has_a_deadline(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(DeadlineError):
        orders_of(ends[0]).receive(0.01)


def test_the_end_is_an_event_and_comes_after_what_was_said(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    agent, worker = words_of(ends[0]), orders_of(ends[1])
    worker.send(Waiting())
    worker.close()
    assert agent.take() == [Waiting()]
    assert agent.ended is not None
    assert agent.take() == []
    with pytest.raises(ConnectionLost):
        agent.receive(5.0)
    assert not agent.send(Leave("x", 1.0))


def test_what_the_peer_said_last_is_heard_even_after_sending_to_it_failed(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    agent, worker = words_of(ends[0]), orders_of(ends[1])
    worker.send(Waiting())
    worker.close()
    agent.send(Leave("x", 1.0))
    assert agent.take() == [Waiting()]


def test_a_peer_that_reads_nothing_holds_nobody_up(ends: tuple[socket.socket, socket.socket]) -> None:
    agent = Stream(ends[0], msgspec.msgpack.Decoder(Word), max_backlog=1 << 20)
    order = Leave("x" * 10_000, 1.0)
    sent = 0
    while agent.send(order):
        sent += 1
        assert sent < 10_000
    assert "unread" in str(agent.ended)


def test_what_waited_is_sent_once_the_peer_reads(ends: tuple[socket.socket, socket.socket]) -> None:
    agent, worker = words_of(ends[0]), orders_of(ends[1])
    orders = [Leave(str(number) * 1000, 1.0) for number in range(300)]
    for order in orders:
        agent.send(order)
    assert agent.has_backlog
    assert not agent.drain(0.01)
    got: list[object] = []
    while len(got) < len(orders):
        got += worker.take()
        agent.flush()
    assert got == orders
    assert agent.drain(5.0)


@pytest.mark.parametrize(
    "junk", [struct.pack("<I", 1 << 30), struct.pack("<I", 3) + b"abc", struct.pack("<I", 2) + b"\x91\x63"]
)
def test_what_is_no_message_ends_the_stream(junk: bytes, ends: tuple[socket.socket, socket.socket]) -> None:
    agent = words_of(ends[0])
    ends[1].send(junk)
    assert agent.take() == []
    assert agent.ended is not None


def test_a_message_that_is_too_long_is_refused_where_it_is_sent(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    with pytest.raises(HoldfastError, match="are allowed"):
        words_of(ends[0]).send(Leave("x" * (2 << 20), 1.0))
