"""Frames between trainer and vault: limits first, violations end the connection, nothing leaks."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from holdfast.errors import DeadlineError
from holdfast.wire import ConnectionLost, FrameSocket


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int
    data: bytes = b""


class Pong(msgspec.Struct, frozen=True, tag=True):
    number: int


MESSAGES: msgspec.msgpack.Decoder[Ping | Pong] = msgspec.msgpack.Decoder(Ping | Pong)
Frames = FrameSocket[Ping | Pong]


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Frames]]:
    """A plain socket, and the framed end it talks to."""
    ours, theirs = socket.socketpair()
    frames: Frames = FrameSocket(theirs, MESSAGES, max_frame=1 << 16)
    with ours:
        yield ours, frames
    frames.close()


@pytest.fixture
def pair() -> Iterator[tuple[Frames, Frames]]:
    left, right = socket.socketpair()
    ends: list[Frames] = [FrameSocket(end, MESSAGES) for end in (left, right)]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def frame(body: bytes) -> bytes:
    return struct.pack("<IB", len(body), 0) + body


PING = msgspec.msgpack.encode(Ping(7))


def test_messages_arrive_whole_and_in_order(
    pair: tuple[Frames, Frames],
) -> None:
    here, there = pair
    for number in range(50):
        here.send(Ping(number, bytes(number * 10)) if number % 2 else Pong(number))
    for number in range(50):
        message, fds = there.receive(timeout_s=10.0)
        assert message.number == number
        assert fds == []


def test_large_message_passes_a_small_buffer(
    pair: tuple[Frames, Frames],
) -> None:
    here, there = pair
    data = os.urandom(20 << 20)
    sender = threading.Thread(target=here.send, args=[Ping(1, data)])
    sender.start()
    message, _ = there.receive(timeout_s=30.0)
    sender.join(10.0)
    assert isinstance(message, Ping)
    assert message.data == data


def test_frames_in_pieces(raw: tuple[socket.socket, Frames]) -> None:
    sock, frames = raw
    whole = frame(PING) * 2
    for at in range(len(whole)):
        sock.sendall(whole[at : at + 1])
        if at == 5:
            with pytest.raises(DeadlineError):
                frames.receive(timeout_s=0.01)
    assert frames.receive(timeout_s=10.0)[0] == Ping(7)
    assert frames.receive(timeout_s=10.0)[0] == Ping(7)


def test_half_a_frame_and_then_the_end(raw: tuple[socket.socket, Frames]) -> None:
    sock, frames = raw
    sock.sendall(frame(PING)[:-1])
    sock.close()
    with pytest.raises(ConnectionLost, match="closed the connection"):
        frames.receive(timeout_s=10.0)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (struct.pack("<IB", (1 << 16) + 1, 0), "announced a frame of 65,537 bytes"),
        (struct.pack("<IB", 2**32 - 1, 0), "announced a frame of 4,294,967,295 bytes"),
        (struct.pack("<IB", len(PING), 1) + PING, "announced 1 descriptors and sent 0"),
        (frame(b"\xc1" * 10), "a message that is none"),
        (frame(b""), "a message that is none"),
        (frame(msgspec.msgpack.encode({"type": "Other", "number": 1})), "a message that is none"),
        (frame(msgspec.msgpack.encode({"type": "Ping", "number": "one"})), "a message that is none"),
        (frame(b"\x91" * 60_000), "a message that is none"),
    ],
    ids=[
        "too long",
        "far too long",
        "no descriptor",
        "not MessagePack",
        "empty",
        "unknown",
        "mistyped",
        "deep",
    ],
)
def test_violations_end_the_connection(sent: bytes, message: str, raw: tuple[socket.socket, Frames]) -> None:
    sock, frames = raw
    sock.sendall(sent)
    with pytest.raises(ConnectionLost, match=message):
        frames.receive(timeout_s=10.0)
    sock.settimeout(10.0)
    assert sock.recv(1) == b""


def test_descriptors_travel_with_their_message(
    pair: tuple[Frames, Frames],
) -> None:
    here, there = pair
    fds = [os.memfd_create(f"test-{number}") for number in range(3)]
    for number, fd in enumerate(fds):
        os.write(fd, str(number).encode())
    here.send(Ping(0), tuple(fds))
    for fd in fds:
        os.close(fd)
    message, received = there.receive(timeout_s=10.0)
    assert message == Ping(0)
    assert [os.pread(fd, 9, 0) for fd in received] == [b"0", b"1", b"2"]
    assert not any(os.get_inheritable(fd) for fd in received)
    for fd in received:
        os.close(fd)


def test_descriptors_belong_to_the_message_they_came_with(
    pair: tuple[Frames, Frames],
) -> None:
    """A message sent just before one with descriptors must not get them."""
    here, there = pair
    fd = os.memfd_create("test")
    here.send(Ping(1))
    here.send(Ping(2), (fd,))
    os.close(fd)
    first, none = there.receive(timeout_s=10.0)
    second, one = there.receive(timeout_s=10.0)
    for taken in (*none, *one):
        os.close(taken)
    assert (first, len(none)) == (Ping(1), 0)
    assert (second, len(one)) == (Ping(2), 1)


def test_descriptors_that_nobody_took_are_closed() -> None:
    left, right = socket.socketpair()
    here: Frames = FrameSocket(left, MESSAGES)
    there: Frames = FrameSocket(right, MESSAGES)
    read_end, write_end = os.pipe()
    here.send(Ping(1), (write_end,))
    os.close(write_end)
    # Half of the next frame, so that the descriptors are received and not yet handed out.
    left.sendall(frame(PING)[:2])
    there.receive(timeout_s=10.0)[1].clear()
    here.close()
    with pytest.raises(ConnectionLost):
        there.receive(timeout_s=10.0)
    there.close()
    os.close(read_end)


def test_descriptors_that_belong_to_no_frame_end_the_connection(raw: tuple[socket.socket, Frames]) -> None:
    ours, frames = raw
    before = len(os.listdir("/proc/self/fd"))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("10i", *[ours.fileno()] * 10))]
    for number in range(40):  # each frame announces none of the ten that come with it
        ours.sendmsg([frame(msgspec.msgpack.encode(Pong(number)))], rights)

    def take_all() -> None:
        for _ in range(40):
            frames.receive(timeout_s=5.0)

    with pytest.raises(ConnectionLost, match="belong to no frame"):
        take_all()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_peer_death(pair: tuple[Frames, Frames]) -> None:
    here, there = pair
    there.close()
    with pytest.raises(ConnectionLost):
        here.receive(timeout_s=10.0)
    with pytest.raises(ConnectionLost, match="the peer is gone"):
        here.send(Ping(1))


def test_shutdown_wakes_a_receiver(pair: tuple[Frames, Frames]) -> None:
    here, _ = pair
    woken = threading.Event()

    def receive() -> None:
        with pytest.raises(ConnectionLost):
            here.receive(timeout_s=60.0)
        woken.set()

    thread = threading.Thread(target=receive)
    thread.start()
    here.shutdown()
    assert woken.wait(10.0)
    thread.join(10.0)


def test_a_peer_that_does_not_read_times_out(
    pair: tuple[Frames, Frames],
) -> None:
    here, _ = pair
    with pytest.raises(ConnectionLost, match=r"read nothing for 0.1 s"):
        here.send(Ping(1, bytes(64 << 20)), timeout_s=0.1)


def test_two_threads_send_without_mixing(
    pair: tuple[Frames, Frames],
) -> None:
    here, there = pair

    def send(start: int) -> None:
        for number in range(start, start + 500):
            here.send(Ping(number, bytes([start % 251]) * 3000))

    threads = [threading.Thread(target=send, args=[start]) for start in (0, 1000)]
    for thread in threads:
        thread.start()
    seen: list[int] = []
    for _ in range(1000):
        message, _ = there.receive(timeout_s=10.0)
        assert isinstance(message, Ping)
        assert set(message.data) == {(message.number // 1000 * 1000) % 251}
        seen.append(message.number)
    for thread in threads:
        thread.join(10.0)
    assert [n for n in seen if n < 1000] == [*range(500)]
    assert [n for n in seen if n >= 1000] == [*range(1000, 1500)]


def test_a_timeout_of_one_direction_is_not_that_of_the_other(
    pair: tuple[Frames, Frames],
) -> None:
    here, there = pair
    done = threading.Event()

    def receive() -> None:
        here.receive(timeout_s=30.0)
        done.set()

    thread = threading.Thread(target=receive)
    thread.start()
    for number in range(50):
        here.send(Ping(number), timeout_s=0.5)
    there.send(Pong(1))
    assert done.wait(10.0)
    thread.join(10.0)


FORKS = """
import os, socket, sys
from tests.wire.test_frames import MESSAGES, FrameSocket, Pong
frames = FrameSocket(socket.socket(fileno=int(sys.argv[1])), MESSAGES)
if not os.fork():
    frames.close()
    os.write(int(sys.argv[2]), b"x")
    sys.stdin.read()
    os._exit(0)
while True:
    message, _ = frames.receive(timeout_s=30.0)
    frames.send(Pong(message.number))
"""


@pytest.mark.process
def test_a_connection_belongs_to_no_forked_child() -> None:
    ours, theirs = socket.socketpair()
    ready, said = os.pipe()
    program = [sys.executable, "-c", FORKS, str(theirs.fileno()), str(said)]
    parent = subprocess.Popen(program, stdin=subprocess.PIPE, pass_fds=(theirs.fileno(), said))
    theirs.close()
    os.close(said)
    frames: Frames = FrameSocket(ours, MESSAGES)
    try:
        assert os.read(ready, 1) == b"x"
        frames.send(Ping(3))  # what the child did with its copy has left this one alone
        assert frames.receive(timeout_s=30.0)[0] == Pong(3)
        parent.kill()
        assert parent.wait(30.0) == -signal.SIGKILL
        with pytest.raises(ConnectionLost):  # although the child lives
            frames.receive(timeout_s=30.0)
    finally:
        parent.kill()
        assert parent.stdin is not None
        parent.stdin.close()
        parent.wait(30.0)
        frames.close()
        os.close(ready)
