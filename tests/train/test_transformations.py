"""An optax transformation by its name: mistakes found before the start, sharded state, the same bits."""

from __future__ import annotations

from pathlib import Path

import jax
import optax
import pytest

from holdfast.arrays import flatten_tree
from holdfast.errors import ConfigError, UsageError
from holdfast.recipes import resolve
from holdfast.train.config import TrainConfig
from holdfast.train.memory import memory
from holdfast.train.mesh import MeshConfig
from holdfast.train.optimizer import OptimizerConfig
from holdfast.train.state import OPTIMIZER
from holdfast.train.step import Steps
from holdfast.train.transformations import check_fits, digest, made, shapes
from holdfast.train.update import owners
from tests.train.runs import train
from tests.train.tiny import tiny

LION = ("optimizer.transformation=optax:lion", "optimizer.arguments=learning_rate=1.0,weight_decay=0")
OWN = """
import optax


def make(b1=0.9):
    return optax.chain(optax.trace(decay={decay}), optax.scale(-1.0))


def three():
    return 3


def fails():
    raise ZeroDivisionError("no")


def shrinks():
    return optax.GradientTransformation(lambda params: (), lambda grads, state, params: (grads["embed"], ()))


def grows():
    return optax.GradientTransformation(lambda params: (), lambda grads, state, params: (grads, (grads,)))
"""


def named(text: str, *arguments: str) -> OptimizerConfig:
    return OptimizerConfig(transformation=text, arguments=arguments)


def test_mistakes_are_listed_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unclear.py").write_text("def (", encoding="utf-8")
    (tmp_path / "own_steps.py").write_text(
        "raise RuntimeError('it ran')\n\n\ndef make(): ...\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolve(
            "recipes.tiny",
            [
                "optimizer.transformation=optax:lionn",
                "optimizer.arguments=a=1,b,a=2",
                "optimizer.b1=0.8",
                "seed=-1",
            ],
        )
    told = "\n".join(caught.value.problems)
    for part in ("did you mean optax:lion?", "holds 'b'", "has a twice", "optimizer.b1 is 0.8", "seed is -1"):
        assert part in told
    for text, says in (
        ("lion", "names no function"),
        ("no_such_steps:make", "no module no_such_steps"),
        ("optax.nothing:make", "no module optax.nothing"),
        ("nowhere.py:make", "no such file"),
        ("unclear.py:make", "is no Python"),
        ("own_steps:mak", "did you mean own_steps:make?"),
        ("./own_steps.py:other", "has no other"),
    ):
        (problem,) = named(text).problems()
        assert says in str(problem), text
    assert named("own_steps:make").problems() == []  # and it did not run
    (problem,) = OptimizerConfig(arguments=("b1=1",)).problems()
    assert "optimizer.transformation=optax:lion" in problem.hint


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("three", "gave a int"),
        ("fails", "failed: ZeroDivisionError: no"),
        ("shrinks", "an update of other parameters"),
        ("grows", "a state that is not like the one before"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_what_makes_no_transformation_is_refused_before_the_start(
    tmp_path: Path, name: str, says: str
) -> None:
    (tmp_path / "own.py").write_text(OWN.format(decay=0.9), encoding="utf-8")
    config = named(f"{tmp_path}/own.py:{name}")
    with pytest.raises(ConfigError) as caught:
        check_fits(config, made(config), tiny().model)
    assert says in str(caught.value)


def test_one_that_needs_more_than_gradients_is_refused() -> None:
    config = named("optax:lbfgs", "learning_rate=1")
    with pytest.raises(ConfigError, match=r"value_fn.*update\(updates, state, params\) is all"):
        check_fits(config, made(config), tiny().model)


@pytest.mark.parametrize(
    ("text", "arguments", "beside"),
    [
        ("optax:lion", ("learning_rate=1.0",), 1),
        ("optax:adafactor", ("learning_rate=1.0", "min_dim_size_to_factor=8"), None),
        ("optax.contrib:muon", ("learning_rate=1.0",), None),
        ("optax:add_noise", ("eta=0.1", "gamma=0.5", "key=1"), 0),
    ],
)
def test_what_lies_beside_a_parameter_is_found_in_any_state(
    text: str, arguments: tuple[str, ...], beside: int | None
) -> None:
    params = shapes(tiny().model)
    leaves = flatten_tree(params).leaves
    state = jax.eval_shape(made(named(text, *arguments)).init, params)
    found = owners(state, params)
    if beside is not None:
        assert sorted(one for one in found if one is not None) == sorted(list(range(len(leaves))) * beside)
    for leaf, owner in zip(flatten_tree(state).leaves, found, strict=True):
        assert owner is None or leaf.shape == leaves[owner].shape
        if owner is None:
            assert leaf.shape not in {(320, 16), (16, 32)}  # nothing as large as a matrix is on every device


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("flat", [0, 2])
def test_its_state_is_shared_as_adams_is(zero: int, flat: int) -> None:
    def placed(*settings: str) -> Steps:
        config = tiny("batch.micro=2", f"mesh.zero={zero}", f"optimizer.flat_shards={flat}", *settings)
        layout = MeshConfig(fsdp=2, zero=zero).build(jax.devices()[:2])
        return Steps(config, config.model.build(), layout, config.optimizer.build())

    lion, adam = placed(*LION), placed()
    assert lion.shardings["opt"].inner[0].mu == adam.shardings["opt"].inner[0].mu
    assert any(not one.is_fully_replicated for one in jax.tree.leaves(lion.shardings["opt"].inner[0].mu))
    state = lion.init(jax.random.key(0))
    assert state["opt"].inner[0].mu.keys() == adam.shapes["opt"].inner[0].mu.keys()
    after, _ = lion.apply(
        state, jax.tree.map(lambda one: jax.numpy.ones(one.shape), lion.sums_shapes), 1e-3, 0.0
    )
    where = jax.tree.map(lambda one: one.sharding, after["opt"].inner[0].mu)
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b, c: a.is_equivalent_to(b, c.ndim),
            where,
            lion.shardings["opt"].inner[0].mu,
            after["opt"].inner[0].mu,
        )
    )


def test_the_plan_counts_what_it_keeps() -> None:
    adam = memory(tiny())
    lion = memory(tiny(*LION))
    assert lion.optimizer == adam.optimizer // 2 + 4  # one moment instead of two, and a counter
    shared = memory(tiny(*LION, "batch.micro=2", "mesh.fsdp=2"))
    assert shared.optimizer < 0.6 * lion.optimizer
    flat = memory(tiny(*LION, "batch.micro=2", "mesh.fsdp=2", "optimizer.flat_shards=2"))
    assert flat.optimizer == (lion.optimizer - 4) // 2 + 4


def test_a_digest_is_of_what_is_computed(tmp_path: Path) -> None:
    model = tiny().model
    one = digest(optax.sgd(1.0, momentum=0.9), model)
    assert digest(optax.sgd(1.0, momentum=0.9), model) == one
    assert digest(optax.sgd(1.0, momentum=0.8), model) != one
    assert one.startswith(f"jax {jax.__version__}, optax {optax.__version__}: ")
    assert tiny(*LION).digest != tiny().digest


@pytest.mark.process
def test_a_run_with_one_resumes_to_the_same_bits(tmp_path: Path) -> None:
    source = tmp_path / "own.py"
    source.write_text(OWN.format(decay=0.9), encoding="utf-8")

    def config(*more: str) -> TrainConfig:
        return tiny(f"optimizer.transformation={source}:make", "rate.decay=64", "rate.peak=1e-1", *more)

    whole = train(config(), tmp_path, name="whole")
    adam = train(tiny("rate.decay=64", "rate.peak=1e-1"), tmp_path, name="adam")
    assert whole.state != adam.state
    cut = train(config("samples=24"), tmp_path, name="cut")
    assert (cut.folder / OPTIMIZER).read_text().startswith("jax ")
    # Its code changes between two starts: refused, until it is said to be meant.
    source.write_text(OWN.format(decay=0.5), encoding="utf-8")
    with pytest.raises(UsageError, match="computes something else") as caught:
        train(config(), tmp_path, name="cut")
    assert "--accept optimizer.transformation" in (caught.value.hint or "")
    with pytest.raises(UsageError, match=r"optimizer\.transformation was"):
        train(tiny("rate.decay=64", "rate.peak=1e-1"), tmp_path, name="cut")
    source.write_text(
        OWN.format(decay=0.9).replace("b1=0.9", "b2=0.5"), encoding="utf-8"
    )  # nothing that counts
    assert train(config(), tmp_path, name="cut").state == whole.state
    with pytest.raises(UsageError, match=r"the optimizer state of adamw, and this run has .*own\.py:make"):
        train(config(), tmp_path, name="other", source=str(adam.folder))
