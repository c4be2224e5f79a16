"""What does not fit is refused before a byte moves, with every offender named; nothing else is harmed.

Real processes, and a proxy between them that counts what moved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, final

import pytest

from tests.checkpoint.children import Children
from tests.transfer.children import Arrays, Line, PeerProcess, array, peers
from tests.transfer.proxy import Proxy

pytestmark = pytest.mark.process

TOKEN = "an example of a token, 32 bytes."
TREE = [
    array("w", (64, 256)),  # 64 KiB each: more than all that is said before a byte moves
    array("u", (64, 256)),
    array("bias", (256,), dtype="bfloat16"),
]
SAID_BYTES = 30_000


def changed(name: str, **fields: Any) -> Arrays:
    """The tree with one array described otherwise."""
    return [{**one, **fields} if one["name"] == name else one for one in TREE]


@final
class Pair:
    """A source that serves version 1, a target that has it, and a proxy between them."""

    def __init__(self, children: Children) -> None:
        options = {"token": TOKEN, "transports": ["tcp"], "idle_s": 3.0, "chunk_bytes": 1 << 16}
        self.source, self.target = peers(children, 2, **options)
        self.proxy = Proxy(self.source.address)
        self.source.publish(TREE, 1)
        self.target.prepare([self.proxy.address], TREE, plan="good")
        self.target.pulled(1, plan="good")

    def refused(self, line: Line, kind: str, *parts: str, before: int) -> None:
        """Check an error, that nothing moved for it, and that all else is as it was."""
        assert line["saw"] == "error", line
        assert line["kind"] == kind, line
        for part in parts:
            assert part in line["text"], line["text"]
        assert self.proxy.count["down"] - before < SAID_BYTES
        self.target.serves(1, plan="good")
        self.target.pulled(1, plan="good")

    def prepare_wrong(
        self, arrays: Arrays, kind: str, *parts: str, name: str = "policy", **more: Any
    ) -> None:
        before = self.proxy.count["down"]
        line = self.target.ask(
            "prepare", plan="wrong", peers=[self.proxy.address], name=name, arrays=arrays, rank=0, **more
        )
        self.refused(line, kind, *parts, before=before)


@pytest.fixture(scope="module")
def module_children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    started = Children(tmp_path_factory.mktemp("children"))
    yield started
    started.end_all()


@pytest.fixture(scope="module")
def pair(module_children: Children) -> Iterator[Pair]:
    found = Pair(module_children)
    yield found
    found.proxy.close()


HINT = "parts= selects a subset"


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        (changed("w", dtype="bfloat16"), ["w: dtype bfloat16 wanted, float32", "cast=True"]),
        (changed("w", dtype="int32"), ["w: dtype int32 wanted, float32"]),
        ([array("w", (256, 64)), *TREE[1:]], ["w: shape (256, 64) wanted, (64, 256)"]),
        ([array("w", (64, 255)), *TREE[1:]], ["w: shape (64, 255) wanted, (64, 256)"]),
        ([array("w", (64, 256, 1)), *TREE[1:]], ["w: shape (64, 256, 1) wanted, (64, 256)"]),
        ([array("w", (16384,)), *TREE[1:]], ["w: shape (16384,) wanted, (64, 256)"]),
        ([*TREE, array("more", (3,))], ["more: not in the publication"]),
        (TREE[1:], ["w: in the publication, not in the template"]),
        (
            [array("w", (1, 2)), array("x", (3,)), changed("bias", dtype="float16")[2]],
            ["disagree in 4 places", "w: shape", "x: not in", "u: in the publication", "bias: dtype"],
        ),
    ],
    ids=[
        "dtype", "dtype of equal size", "axes swapped", "shape", "rank", "flat", "missing", "extra",
        "all at once",
    ],
)  # fmt: skip
def test_a_template_that_does_not_fit(pair: Pair, arrays: Arrays, parts: list[str]) -> None:
    pair.prepare_wrong(arrays, "MismatchError", *parts, HINT)


def test_a_scalar_is_no_array(pair: Pair) -> None:
    pair.prepare_wrong([*TREE, array("step", (1,))][:4], "MismatchError", "step: the template has")


def test_an_unknown_name(pair: Pair) -> None:
    pair.prepare_wrong(TREE, "VersionGoneError", "critic", name="critic", timeout_s=1.0)


def test_a_version_that_never_comes(pair: Pair) -> None:
    before = pair.proxy.count["down"]
    line = pair.target.pull(99, plan="good", deadline_s=0.5)
    assert line["kind"] in ("VersionGoneError", "StalledError"), line
    pair.refused(line, line["kind"], "99", "policy", before=before)


def test_a_version_that_is_gone(pair: Pair) -> None:
    name = "gone"
    pair.source.publish(TREE, 1, name=name)
    pair.target.prepare([pair.proxy.address], TREE, plan=name, name=name)
    pair.source.publish(TREE, 2, name=name)
    pair.source.do("release", name=name, version=1)
    before = pair.proxy.count["down"]
    line = pair.target.pull(1, plan=name, deadline_s=2.0)
    pair.refused(line, "VersionGoneError", "1", name, before=before)
    pair.target.pulled(2, plan=name)
    pair.target.pulled(None, plan=name)


@pytest.mark.parametrize("version", [1, 0])
def test_versions_only_grow(pair: Pair, version: int) -> None:
    line = pair.source.ask("publish", name="policy", arrays=TREE, rank=0, version=version)
    pair.refused(line, "UsageError", before=pair.proxy.count["down"])


@pytest.mark.parametrize(
    "arrays",
    [
        [array("w", (32, 512)), *TREE[1:]],
        changed("w", dtype="int32"),
        TREE[1:],
        [*TREE, array("more", (3,))],
    ],
    ids=["shape", "dtype", "missing", "extra"],
)
def test_a_version_that_does_not_fit_the_plan(
    pair: Pair, arrays: Arrays, request: pytest.FixtureRequest
) -> None:
    """The same name, but not the same arrays: a plan never moves what it was not made for."""
    name = request.node.name
    pair.source.publish(TREE, 1, name=name)
    pair.target.prepare([pair.proxy.address], TREE, plan=name, name=name)
    pair.target.pulled(1, plan=name)
    pair.source.publish(arrays, 2, name=name)
    before = pair.proxy.count["down"]
    pair.refused(pair.target.pull(2, plan=name), "MismatchError", before=before)
    pair.target.serves(1, plan=name)
    pair.source.publish(TREE, 3, name=name)
    pair.target.pulled(3, plan=name)


def test_another_order_of_leaves_moves_by_name(pair: Pair) -> None:
    """`w` and `u` have one shape: by order they would be swapped without a word."""
    pair.target.prepare([pair.proxy.address], TREE[::-1], plan="reversed")
    pair.target.pulled(1, plan="reversed")


def test_another_axis_and_another_number_of_shards_is_no_mismatch(pair: Pair) -> None:
    cut = copy.deepcopy(TREE)
    cut[0] = array("w", (64, 256), cuts=[(), (100, 200)])
    cut[1] = array("u", (64, 256), cuts=[(1, 2, 63), (128,)])
    pair.target.prepare([pair.proxy.address], cut, plan="cut")
    pair.target.pulled(1, plan="cut")


def halves(axis: int) -> Arrays:
    cuts: list[tuple[int, ...]] = [(), ()]
    cuts[axis] = (32,)
    return [array("w", (64, 64), cuts=cuts, holders=[[0], [1]])]


@pytest.fixture(scope="module")
def second(module_children: Children) -> PeerProcess:
    """A second source."""
    (found,) = peers(module_children, 1, token=TOKEN, transports=["tcp"])
    return found


def test_half_of_the_shards_are_not_all(pair: Pair) -> None:
    pair.source.publish(halves(0), 1, rank=0, name="half")
    whole = [array("w", (64, 64))]
    pair.prepare_wrong(whole, "MismatchError", "w: the peers' slices do not make up the array", name="half")


def test_peers_that_cut_along_different_axes(pair: Pair, second: PeerProcess) -> None:
    pair.source.publish(halves(0), 1, rank=0, name="axes")
    second.publish(halves(1), 1, rank=1, name="axes")
    both = [pair.proxy.address, second.address]
    before = pair.proxy.count["down"]
    line = pair.target.ask("prepare", plan="x", peers=both, name="axes", arrays=halves(0), rank=0)
    pair.refused(line, "MismatchError", "w: the peers' slices do not make up the array", before=before)


def test_peers_that_have_different_shapes_and_dtypes(pair: Pair, second: PeerProcess) -> None:
    pair.source.publish([array("w", (64, 64)), array("u", (8,))], 1, name="shapes")
    second.publish([array("w", (64, 32)), array("u", (8,), dtype="float16")], 1, name="shapes")
    both = [pair.proxy.address, second.address]
    before = pair.proxy.count["down"]
    line = pair.target.ask("prepare", plan="x", peers=both, name="shapes", arrays=TREE, rank=0)
    pair.refused(line, "MismatchError", "w: ", "u: ", "float16[8]", before=before)


def test_peers_at_different_versions(pair: Pair, second: PeerProcess) -> None:
    """The newest that all have; one that only some have is waited for, and no mixture is ever made."""
    pair.source.publish(halves(0), 1, rank=0, name="skew")
    second.publish(halves(0), 1, rank=1, name="skew")
    whole = [array("w", (64, 64))]
    pair.target.prepare([second.address, pair.proxy.address], whole, plan="skew", name="skew")
    pair.target.pulled(1, plan="skew")
    pair.source.publish(halves(0), 2, rank=0, name="skew")
    assert pair.target.pulled(None, plan="skew")["version"] == 1
    before = pair.proxy.count["down"]
    line = pair.target.pull(2, plan="skew", deadline_s=0.5)
    assert line["kind"] in ("VersionGoneError", "StalledError"), line
    pair.refused(line, line["kind"], second.address.removeprefix("tcp://"), before=before)
    pair.target.serves(1, plan="skew")
    second.publish(halves(0), 2, rank=1, name="skew")
    pair.target.pulled(2, plan="skew")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"token": "another token of enough length"}, "token"),
        ({"token": None}, "the client has no token and this end has one"),
        ({"token": TOKEN, "run": "other"}, "another run is served here than 'other'"),
    ],
    ids=["wrong token", "no token", "wrong run"],
)
def test_a_stranger_is_told_why(
    pair: Pair, module_children: Children, options: dict[str, Any], part: str
) -> None:
    (stranger,) = peers(module_children, 1, transports=["tcp"], **options)
    before = pair.proxy.count["down"]
    line = stranger.ask("prepare", plan="x", peers=[pair.proxy.address], name="policy", arrays=TREE, rank=0)
    pair.refused(line, "HandshakeError", part, before=before)
    stranger.child.close()


def test_a_restarted_source_is_noticed_and_a_stale_one_refused(children: Children) -> None:
    """Same address, other incarnation: the next run works if the arrays are the same; else a mismatch."""
    source, target = peers(children, 2, transports=["tcp"], idle_s=2.0)
    bind = source.address.removeprefix("tcp://")
    source.publish(TREE, 5)
    target.prepare([source.address], TREE)
    target.pulled(5)
    for arrays, works in ((TREE, True), (changed("w", dtype="int32"), False), (TREE, True)):
        source.child.close()
        source = PeerProcess(children, transports=["tcp"], idle_s=2.0, bind=bind).started()
        source.publish(arrays, 6 if works else 7)
        if works:
            target.pulled(6)
        else:
            line = target.pull(None)
            assert line["kind"] == "MismatchError", line
            assert "w" in line["text"]
            target.serves(6)


def test_no_listening_beyond_loopback_without_a_token(children: Children) -> None:
    (peer,) = peers(children, 1)
    peer.do("close")
    line = peer.ask("open", bind="0.0.0.0:0")
    assert line["kind"] == "UsageError", line
    assert "token" in line["text"]
    peer.do("open", bind="0.0.0.0:0", token=TOKEN)
