"""The handshake: both ends know the token or nobody gets in, and nothing said once is of use again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import HandshakeError, UsageError
from holdfast.wire import (
    MAX_HANDSHAKE,
    NONCE_BYTES,
    ClientHandshake,
    FrameSplitter,
    ServerHandshake,
    refusal,
)

TOKEN = b"0123456789abcdef0123456789abcdef"
OTHER = b"0123456789abcdef0123456789abcdeF"
_numbers = itertools.count(1)


def nonce() -> bytes:
    return next(_numbers).to_bytes(NONCE_BYTES, "big")


def client(token: bytes | None = TOKEN, run: str = "r1", purpose: str = "coord") -> ClientHandshake:
    return ClientHandshake(purpose=purpose, run=run, token=token, nonce=nonce())


def server(token: bytes | None = TOKEN, run: str = "r1", purpose: str = "coord") -> ServerHandshake:
    return ServerHandshake(purpose=purpose, run=run, token=token, nonce=nonce())


def body(frame: bytes) -> bytes:
    (found,) = FrameSplitter(max_frame=MAX_HANDSHAKE).feed(frame)
    return found


@pytest.mark.parametrize("token", [TOKEN, None], ids=["token", "open"])
def test_both_ends_agree(token: bytes | None) -> None:
    here, there = client(token), server(token)
    challenge = there.receive(body(here.offer()))
    states = [(here.done, there.done)]
    proof = here.receive(body(challenge))
    states.append((here.done, there.done))
    assert there.receive(body(proof)) == b""
    states.append((here.done, there.done))
    assert states == [(False, False), (True, False), (True, True)]


def test_the_token_is_not_on_the_wire() -> None:
    here, there = client(), server()
    said = here.offer()
    said += (challenge := there.receive(body(said)))
    said += here.receive(body(challenge))
    assert TOKEN not in said
    assert all(TOKEN[at : at + 8] not in said for at in range(0, 32, 8))


def test_a_server_with_another_token_is_found_out_first() -> None:
    """The client has proven nothing to it by then."""
    here, there = client(), server(OTHER)
    with pytest.raises(HandshakeError, match="the server does not know the run's token"):
        here.receive(body(there.receive(body(here.offer()))))
    assert not here.done


def test_a_client_with_another_token_is_turned_away() -> None:
    there, liar = server(), client(OTHER)
    there.receive(body(liar.offer()))
    # It answers as if the challenge had been right.
    impostor = ServerHandshake(purpose="coord", run="r1", token=OTHER, nonce=there._nonce)
    proof = liar.receive(body(impostor.receive(body(liar.offer()))))
    with pytest.raises(HandshakeError, match="the client does not know the run's token"):
        there.receive(body(proof))
    assert not there.done


@pytest.mark.parametrize(
    ("here", "there", "message"),
    [
        (client(run="r2"), server(), "another run is served here than 'r2'"),
        (client(purpose="transfer"), server(), "this is no place for 'transfer'"),
        (client(None), server(), "the client has no token and this end has one"),
        (client(), server(None), "the client has a token and this end has none"),
    ],
    ids=["run", "purpose", "no token", "unneeded token"],
)
def test_the_server_turns_away_with_a_reason(
    here: ClientHandshake, there: ServerHandshake, message: str
) -> None:
    with pytest.raises(HandshakeError, match=message) as caught:
        there.receive(body(here.offer()))
    with pytest.raises(HandshakeError, match=f"turned away: {message}"):
        here.receive(body(refusal(caught.value.message)))


def test_a_client_with_a_token_is_not_talked_out_of_it() -> None:
    """An open server that answers a sealed offer gets nothing."""
    here = client()
    imitation = server(None).receive(body(client(None).offer()))
    with pytest.raises(HandshakeError, match="the server has no token"):
        here.receive(body(imitation))


def test_a_recorded_client_is_of_no_use() -> None:
    here, there = client(), server()
    offer = here.offer()
    proof = here.receive(body(there.receive(body(offer))))
    again = server()
    again.receive(body(offer))
    with pytest.raises(HandshakeError, match="the client does not know"):
        again.receive(body(proof))


def test_a_recorded_server_is_of_no_use() -> None:
    challenge = server().receive(body(client().offer()))
    with pytest.raises(HandshakeError, match="the server does not know"):
        client().receive(body(challenge))


def test_a_server_that_sends_our_own_words_back_is_of_no_use() -> None:
    """Without the direction in the proof, a second connection to the same server would answer the first."""
    here, there = client(), server()
    challenge = there.receive(body(here.offer()))
    with pytest.raises(HandshakeError):
        there.receive(body(challenge))
    with pytest.raises(HandshakeError):
        here.receive(body(here.offer()))
    mirror = ClientHandshake(purpose="coord", run="r1", token=TOKEN, nonce=there._nonce)
    with pytest.raises(HandshakeError, match="no nonce of its own"):
        ServerHandshake(purpose="coord", run="r1", token=TOKEN, nonce=there._nonce).receive(
            body(mirror.offer())
        )


def test_a_proof_of_one_run_is_none_of_another() -> None:
    """Lengths are in the transcript: 'ab' + 'c' is not 'a' + 'bc'."""
    one, two = nonce(), nonce()
    first = ServerHandshake(purpose="ab", run="c", token=TOKEN, nonce=one)
    offer = ClientHandshake(purpose="ab", run="c", token=TOKEN, nonce=two).offer()
    challenge = first.receive(body(offer))
    with pytest.raises(HandshakeError, match="does not know"):
        ClientHandshake(purpose="a", run="bc", token=TOKEN, nonce=two).receive(body(challenge))


def test_nothing_more_after_the_end() -> None:
    here, there = client(), server()
    challenge = there.receive(body(here.offer()))
    proof = here.receive(body(challenge))
    there.receive(body(proof))
    with pytest.raises(HandshakeError, match="over already"):
        there.receive(body(proof))
    with pytest.raises(HandshakeError, match="over already"):
        here.receive(body(challenge))


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4))
def test_any_bytes_never_pass(bodies: list[bytes]) -> None:
    for token in (TOKEN, None):
        ends: list[ClientHandshake | ServerHandshake] = [client(token), server(token)]
        for end in ends:
            for each in bodies:
                with pytest.raises(HandshakeError):
                    end.receive(each)
            assert not end.done


@given(st.integers(0, 2), st.data())
def test_a_changed_byte_never_passes(which: int, data: st.DataObject) -> None:
    here, there = client(), server()

    def bent(number: int, frame: bytes) -> bytes:
        text = bytearray(body(frame))
        if number == which:
            at = data.draw(st.integers(0, len(text) - 1))
            text[at] ^= data.draw(st.integers(1, 255))
        return bytes(text)

    with pytest.raises(HandshakeError):  # noqa: PT012 - any of the three may be the one that notices
        challenge = there.receive(bent(0, here.offer()))
        proof = here.receive(bent(1, challenge))
        there.receive(bent(2, proof))
    assert not there.done


def test_a_token_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(UsageError, match="a token of 6 bytes can be guessed"):
        client(b"secret")


def test_every_frame_is_within_the_limit() -> None:
    run = "ä" * 128
    here = ClientHandshake(purpose="p" * 256, run=run, token=TOKEN, nonce=nonce())
    assert len(here.offer()) < MAX_HANDSHAKE
    assert len(refusal("ü" * 10_000)) < MAX_HANDSHAKE
    with pytest.raises(UsageError, match="the name of a run"):
        client(run="x" * 257)
