"""A run that begins with the weights of a Hugging Face repository."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from holdfast.errors import UsageError
from holdfast.train.model.hub import check_weights, read_params, write_model
from holdfast.train.state import RunOptions
from tests.cli.saved import holdfast
from tests.train.runs import train
from tests.train.tiny import tiny


def test_weights_fit_the_model_that_they_are_of(tmp_path: Path) -> None:
    config = tiny().model
    shapes = config.build().shapes()
    params = jax.tree.map(lambda one: np.random.default_rng(3).random(one.shape, np.float32), shapes)
    write_model(tmp_path / "hub", config, params)
    check_weights(tmp_path / "hub", config)
    check_weights(tmp_path / "hub", tiny("model.layers=scanned", "model.remat=full").model)
    again = read_params(tmp_path / "hub", config, into=shapes)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    with pytest.raises(UsageError, match=r"model\.hidden=16 model\.head_dim=4$"):
        check_weights(tmp_path / "hub", tiny("model.hidden=32").model)
    with pytest.raises(UsageError, match="--from a and --init-from b"):
        RunOptions(source="a", weights="b").check()


def test_weights_of_another_model_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    golden = Path(__file__).parent / "model" / "golden" / "llama"
    done = holdfast("train", "recipes.tiny", "--init-from", golden, "--folder", tmp_path / "runs")
    assert done.exit_code == 2
    assert "are of another model than the recipe's" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
@pytest.mark.process
@pytest.mark.timeout(300)
def test_weights_that_were_exported_begin_a_run_as_the_checkpoint_does(tmp_path: Path) -> None:
    config = tiny("samples=24")
    train(config, tmp_path, name="first")
    source = tmp_path / "first"
    done = holdfast("hub", "export", source, tmp_path / "hub")
    assert done.exit_code == 0, done.stderr
    tuned = train(config, tmp_path, name="tuned", source=str(source), finetune=True)
    begun = train(config, tmp_path, name="begun", weights=str(tmp_path / "hub"))
    assert begun.state == tuned.state
    # Once it has steps of its own it needs the weights no more.
    again = train(config, tmp_path, name="begun", weights=str(tmp_path / "gone"))
    assert again.state == begun.state
