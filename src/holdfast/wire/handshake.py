"""Both ends prove that they know a token, and neither shows it. No socket, clock or random number in here.

    client                                           server
    Offer(magic, purpose, run, sealed, nonce)  --->
                                               <---  Challenge(magic, sealed, nonce, proof) or Refusal(reason)
    Proof(proof)                               --->

A proof is HMAC-SHA256 with the token as key over the direction, the purpose, the run and both nonces, each
with its length. Whoever records a handshake can use none of it again: the nonces differ. Whoever sends our
words back to us fails: the direction is in the proof, and our own nonce is refused. A proof made for one
purpose or run is worth nothing for another.

Without a token the proofs are empty and nothing is proven. Both ends must have agreed to that beforehand: an
end that has a token never talks to one that has none.

What follows on the connection is neither secret nor sealed; that is the business of the network or of TLS.
"""

from __future__ import annotations

import hmac
from typing import Final, final

import msgspec

from holdfast.errors import HandshakeError, UsageError
from holdfast.wire.splitter import framed

MAX_HANDSHAKE: Final = 2048
"""No frame of a handshake is longer."""
NONCE_BYTES: Final = 32
_MAGIC: Final = b"holdfast/1"
_MAX_NAME: Final = 256
_MIN_TOKEN: Final = 16


class _Offer(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    magic: bytes
    purpose: str
    run: str
    sealed: bool
    nonce: bytes


class _Challenge(msgspec.Struct, frozen=True, array_like=True, tag=2, forbid_unknown_fields=True):
    magic: bytes
    sealed: bool
    nonce: bytes
    proof: bytes


class _Proof(msgspec.Struct, frozen=True, array_like=True, tag=3, forbid_unknown_fields=True):
    proof: bytes


class _Refusal(msgspec.Struct, frozen=True, array_like=True, tag=4, forbid_unknown_fields=True):
    reason: str


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_offer: Final = msgspec.msgpack.Decoder(_Offer).decode
_decode_challenge: Final = msgspec.msgpack.Decoder(_Challenge | _Refusal).decode
_decode_proof: Final = msgspec.msgpack.Decoder(_Proof).decode


def refusal(reason: str) -> bytes:
    """The frame that tells a client why it is turned away."""
    return framed(_encode(_Refusal(reason[:400])))


@final
class ClientHandshake:
    """The end that calls. Send `offer`, give each body that comes to `receive`, until `done`.

    `nonce` is NONCE_BYTES of fresh randomness.
    """

    def __init__(self, *, purpose: str, run: str, token: bytes | None, nonce: bytes) -> None:
        _check(purpose, run, token, nonce)
        self._purpose, self._run, self._token, self._nonce = purpose, run, token, nonce
        self.done = False

    def offer(self) -> bytes:
        """The first frame."""
        sealed = self._token is not None
        return framed(_encode(_Offer(_MAGIC, self._purpose, self._run, sealed, self._nonce)))

    def receive(self, body: bytes) -> bytes:
        """The frame to send in return; what follows it on the wire is the caller's. Fails: HandshakeError."""
        try:
            challenge = None if self.done else _decode_challenge(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _stranger("the peer's challenge", error) from error
        if challenge is None:
            raise HandshakeError("the handshake is over already")
        if isinstance(challenge, _Refusal):
            raise HandshakeError(
                f"turned away: {challenge.reason}", hint="check the run, the token and the address"
            )
        if challenge.magic != _MAGIC:
            raise _version(challenge.magic)
        if challenge.sealed != (self._token is not None):
            raise _disagreement("server", challenge.sealed)
        if len(challenge.nonce) != NONCE_BYTES or hmac.compare_digest(challenge.nonce, self._nonce):
            raise HandshakeError(
                "the peer sent no nonce of its own", hint="somebody sends our own words back"
            )
        expected = _proof(self._token, b"server", self._purpose, self._run, self._nonce, challenge.nonce)
        if not hmac.compare_digest(expected, challenge.proof):
            raise HandshakeError("the server does not know the run's token", hint=_SAME_TOKEN)
        self.done = True
        mine = _proof(self._token, b"client", self._purpose, self._run, self._nonce, challenge.nonce)
        return framed(_encode(_Proof(mine)))


@final
class ServerHandshake:
    """The end that is called. Give each body that comes to `receive` and send what it returns, until `done`.

    A HandshakeError ends it: send `refusal(...)` if you like, and close.
    """

    def __init__(self, *, purpose: str, run: str, token: bytes | None, nonce: bytes) -> None:
        _check(purpose, run, token, nonce)
        self._purpose, self._run, self._token, self._nonce = purpose, run, token, nonce
        self._theirs: bytes | None = None
        self.done = False

    def receive(self, body: bytes) -> bytes:
        """The frame to send in return; empty once all is said. Fails: HandshakeError."""
        if self.done:
            raise HandshakeError("the handshake is over already")
        try:
            return self._challenge(body) if self._theirs is None else self._finish(body, self._theirs)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _stranger("the peer's part of the handshake", error) from error

    def _challenge(self, body: bytes) -> bytes:
        offer = _decode_offer(body)
        if offer.magic != _MAGIC:
            raise _version(offer.magic)
        if offer.purpose != self._purpose:
            raise HandshakeError(f"this is no place for {offer.purpose[:80]!r} but for {self._purpose!r}")
        if offer.run != self._run:
            raise HandshakeError(f"another run is served here than {offer.run[:80]!r}")
        if offer.sealed != (self._token is not None):
            raise _disagreement("client", offer.sealed)
        if len(offer.nonce) != NONCE_BYTES or hmac.compare_digest(offer.nonce, self._nonce):
            raise HandshakeError("the peer sent no nonce of its own")
        self._theirs = offer.nonce
        mine = _proof(self._token, b"server", self._purpose, self._run, offer.nonce, self._nonce)
        return framed(_encode(_Challenge(_MAGIC, self._token is not None, self._nonce, mine)))

    def _finish(self, body: bytes, theirs: bytes) -> bytes:
        expected = _proof(self._token, b"client", self._purpose, self._run, theirs, self._nonce)
        if not hmac.compare_digest(expected, _decode_proof(body).proof):
            raise HandshakeError("the client does not know the run's token", hint=_SAME_TOKEN)
        self.done = True
        return b""


_SAME_TOKEN: Final = "give both ends the same token; a run's token is made once, at its start"


def _proof(token: bytes | None, side: bytes, purpose: str, run: str, client: bytes, server: bytes) -> bytes:
    if token is None:
        return b""
    parts = (_MAGIC, side, purpose.encode(), run.encode(), client, server)
    # With their lengths: no two different handshakes may have the same transcript.
    transcript = b"".join([len(part).to_bytes(4, "little") + part for part in parts])
    return hmac.digest(token, transcript, "sha256")


def _check(purpose: str, run: str, token: bytes | None, nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise UsageError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    if not run or len(run.encode()) > _MAX_NAME or len(purpose.encode()) > _MAX_NAME:
        raise UsageError(f"the name of a run has 1 to {_MAX_NAME} bytes; seen: {run[:80]!r}")
    if token is not None and len(token) < _MIN_TOKEN:
        raise UsageError(
            f"a token of {len(token)} bytes can be guessed",
            hint=f"use at least {_MIN_TOKEN} random bytes, for example from `openssl rand -hex 32`",
        )


def _stranger(what: str, error: Exception) -> HandshakeError:
    return HandshakeError(f"{what} is none: {error}", hint="is something else listening at this address?")


def _version(magic: bytes) -> HandshakeError:
    return HandshakeError(
        f"the peer speaks {magic[:32]!r}, we speak {_MAGIC!r}",
        hint="run the same version of Holdfast at both ends",
    )


def _disagreement(peer: str, sealed: bool) -> HandshakeError:
    if sealed:
        return HandshakeError(f"the {peer} has a token and this end has none", hint=_SAME_TOKEN)
    return HandshakeError(f"the {peer} has no token and this end has one", hint=_SAME_TOKEN)
