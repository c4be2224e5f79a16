"""The config of a run: its hash, its text, and every mistake named at once with the setting to change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, HoldfastError, UsageError
from holdfast.recipes import dense_1b, one_world, resolve, small, tiny
from holdfast.train import TrainConfig

RECIPES = (tiny, small, one_world, dense_1b)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_right_and_survive_their_text(recipe: object) -> None:
    config = resolve(f"recipes.{recipe.__name__}")  # type: ignore[attr-defined]
    assert config.problems() == []
    again = TrainConfig.from_json(config.to_json())
    assert again == config
    assert again.digest == config.digest


def test_the_956m_model_has_956m_parameters() -> None:
    config = dense_1b()
    assert config.model.num_params == 956_368_896
    assert config.batches.size_at(0) * config.seq_len == 32_768


def test_the_hash_is_of_the_settings_alone() -> None:
    assert tiny().digest == tiny().digest
    assert len({recipe().digest for recipe in RECIPES}) == len(RECIPES)
    assert tiny().override(["seed=1"]).digest != tiny().digest
    assert tiny().override(["seed=1", "seed=0"]).digest == tiny().digest


def test_what_follows_from_the_clock() -> None:
    config = small()
    assert config.total_steps == 2000 // 16 + -(-(6400 - 2000) // 32)
    assert config.learning_rate(0) == 0.0
    assert config.learning_rate(640) == config.rate.peak
    assert config.learning_rate(config.samples) == config.rate.floor
    assert config.weight_decay(17) == config.optimizer.weight_decay
    # The decay ends with the run, however long that is made on the command line.
    longer = config.override(["samples=12.8K"])
    assert longer.learning_rate(6400) == config.rate.peak
    assert longer.learning_rate(12800) == config.rate.floor


MISTAKES = [
    ("seq_len=0", "seq_len", "is 0"),
    ("samples=0", "samples", "1 or more"),
    ("seed=-1", "seed", "is -1"),
    ("model.hidden=65", "model.hidden", "which 4 heads do not divide; 64 or 68"),
    ("model.num_heads=0", "model.num_heads", "1 or more"),
    ("model.num_kv_heads=3", "model.num_kv_heads", "choose one of 1, 2, 4"),
    ("model.pattern=*M", "model.pattern", "Mamba-2"),
    ("model.pattern=*x", "model.pattern", "'x' is no layer"),
    ("model.compute_dtype=bf16", "model.compute_dtype", "bfloat16"),
    ("model.attention=cudnn", "model.attention", "cannot compute in float32"),
    ("data.split=a,b", "data.split", "three shares"),
    ("data.sources[0].path=nowhere/set", "data.sources[0].path", "names no token files"),
    ("data.blend=nowhere.json", "data.blend", "cannot be used"),
    ("batch.schedule=33", "batch.schedule", "use 32 or 64"),
    ("batch.schedule=0:32 5", "batch.schedule", "'5' without a point"),
    ("batch.unit=steps", "batch.unit", "tokens, samples"),
    ("batch.lanes=-1", "batch.lanes", "0 or more"),
    ("batch.micro=3", "batch.schedule", "batch.micro=1, 2, 4"),
    ("rate.peak=0", "rate.peak", "more than 0"),
    ("rate.shape=wsd", "rate.wsd_decay", "1 to 8960"),
    ("rate.warmup=1M", "rate.warmup", "nothing is left"),
    ("optimizer.b2=1", "optimizer.b2", "is 1.0"),
    ("optimizer.eps=0", "optimizer.eps", "more than 0"),
    ("optimizer.clip=-1", "optimizer.clip", "0 or more"),
    ("mesh.fsdp=0", "mesh.fsdp", "1 or more"),
    ("mesh.zero=4", "mesh.zero", "choose 1, 2 or 3"),
    ("mesh.tensor=3", "mesh.tensor", "mesh.tensor may be"),
    ("mesh.data=8", "batch.micro", "batch.micro=8"),
    ("mesh.fsdp=16", "evaluation.batch", "evaluation.batch=16"),
    ("checkpoint.every=-1", "checkpoint.every", "0 or more"),
    ("evaluation.batch=5", "evaluation.samples", "evaluation.samples=30"),
    ("log.every=0", "log.every", "1 or more"),
    ("log.trackers=mine", "log.trackers", "module:function"),
    ("log.trackers=json:", "log.trackers", "module:function"),
    ("log.trackers=no_such_module.inner:make", "log.trackers", "there is no module no_such_module;"),
    ("log.trackers=json.nothing:make", "log.trackers", "there is no module json.nothing;"),
    ("data.vocab_size=400", "model.vocab_size", "model.vocab_size=400"),
    ("optimizer.flat_shards=2", "optimizer.flat_shards", "optimizer.flat_shards=1"),
]


@pytest.mark.parametrize(("given", "setting", "says"), MISTAKES, ids=[given for given, _, _ in MISTAKES])
def test_a_mistake_names_its_setting_and_what_would_work(given: str, setting: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("recipes.tiny", [given])
    mine = [problem for problem in error.value.problems if problem.startswith(f"{setting} ")]
    assert mine, error.value
    assert says in mine[0]


def test_all_mistakes_are_reported_at_once() -> None:
    given = {
        "seq_len=0": "seq_len",
        "seed=-1": "seed",
        "model.num_heads=0": "model.num_heads",
        "model.compute_dtype=bf16": "model.compute_dtype",
        "data.split=a,b": "data.split",
        "batch.schedule=33": "batch.schedule",
        "rate.peak=0": "rate.peak",
        "rate.shape=wsd": "rate.wsd_decay",
        "optimizer.b2=1": "optimizer.b2",
        "optimizer.eps=0": "optimizer.eps",
        "mesh.zero=4": "mesh.zero",
        "checkpoint.keep=-1": "checkpoint.keep",
        "evaluation.batch=5": "evaluation.samples",
        "log.every=0": "log.every",
    }
    with pytest.raises(ConfigError, match=f"{len(given)} mistakes") as error:
        resolve("recipes.tiny", given)
    assert {problem.split()[0] for problem in error.value.problems} == set(given.values())


def test_between_parts() -> None:
    with pytest.raises(ConfigError, match=r"check_every is 5, and batch\.lanes=0"):
        resolve("recipes.one_world", ["check_every=5"])
    # A batch that grows beyond what the mesh shares is found before the run starts.
    with pytest.raises(ConfigError, match=r"batch\.schedule is 36"):
        resolve("recipes.one_world", ["batch.schedule=0:32 64K:36", "mesh.fsdp=8"])


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("recipes.tinny", "did you mean recipes.tiny?"),
        ("nothing", "recipes.dense_1b"),
        ("recipes.resolve", "there is no recipe"),
        ("no_such_module:run", "there is no module 'no_such_module'"),
        ("json:dump", "json:dump failed: TypeError"),
        ("json:dumb", "did you mean json:dump?"),
        ("nowhere.py:run", "there is no file nowhere.py"),
        ("nowhere.json", "cannot read nowhere.json"),
        (":", "names no recipe"),
    ],
)
def test_a_recipe_that_is_none(recipe: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve(recipe)
    assert says in str(error.value)


def test_recipes_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from holdfast.recipes import tiny\n\n\ndef mine():\n    return tiny().override(['seed=7'])\n"
    (tmp_path / "own_recipes.py").write_text(text + "\n\ndef wrong():\n    return 3\n", encoding="utf-8")
    expected = tiny().override(["seed=7"])
    assert resolve(f"{tmp_path}/own_recipes.py:mine") == expected
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("own_recipes:mine", ["seed=8"]) == replace(expected, seed=8)
    (tmp_path / "config.json").write_text(expected.to_json(), encoding="utf-8")
    assert resolve("config.json") == expected
    with pytest.raises(UsageError, match="returned int"):
        resolve("own_recipes:wrong")


def test_a_misspelt_setting_is_refused_wherever_it_stands() -> None:
    given = ['data.sources=[{"path":"builtin:tiny","wieght":3}]', "optimizer.no_decay[0].x=1"]
    with pytest.raises(ConfigError, match="2 mistakes") as error:
        resolve("recipes.tiny", given)
    assert "did you mean data.sources[0].weight?" in error.value.problems[0]
    assert "give the whole list: optimizer.no_decay=" in error.value.problems[1]
    with pytest.raises(ConfigError, match=r"did you mean model\.hidden\?"):
        TrainConfig.from_json(tiny().to_json().replace('"hidden"', '"hiden"'))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": 3}', '{"name": "x"}'])
def test_a_text_that_is_no_config(text: str) -> None:
    with pytest.raises(HoldfastError):
        TrainConfig.from_json(text)


def test_no_run_keeps_64_bit_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        tiny().override(["model.param_dtype=float64", "model.compute_dtype=float64"]).check()
    assert [text.partition(" ")[0] for text in caught.value.problems] == [
        "model.param_dtype",
        "model.compute_dtype",
    ]


@pytest.mark.parametrize(
    ("settings", "owners", "hint"),
    [
        (("mesh.fsdp=4",), (0, 0, 1, 1), "mesh.data=2 mesh.fsdp=2, mesh.zero=1, batch.lanes=0 (one world)"),
        (("mesh.fsdp=4", "mesh.zero=1"), (0, 0, 1, 1), ""),
        (("mesh.data=2", "mesh.fsdp=2"), (0, 0, 1, 1), ""),
        (("mesh.fsdp=4", "batch.lanes=0"), (0, 0, 1, 1), ""),
        (("mesh.fsdp=4",), (0, 0, 0, 0), ""),
        # One box of each array for each process.
        (("mesh.fsdp=4",), (0, 1, 2, 3), ""),
        (("mesh.fsdp=2", "mesh.tensor=2"), (0, 0, 1, 1), "mesh.data=2 mesh.fsdp=1, mesh.zero=1,"),
        # No other split of the copies helps, nor another zero: one sample is worked on by both processes.
        (("mesh.tensor=4",), (0, 0, 1, 1), "batch.lanes=0 (one world) or --workers-per-replica 1"),
    ],
)
def test_lanes_of_a_mesh_over_processes_can_be_summed(
    settings: tuple[str, ...], owners: tuple[int, ...], hint: str
) -> None:
    config = tiny().override(["batch.micro=4", "model.num_kv_heads=4", *settings])
    assert config.problems() == []
    found = config.world_problems(owners)
    assert [problem.setting for problem in found] == (["mesh"] if hint else [])
    for problem in found:
        assert "over 2 processes: of the sums of 8 lanes (batch.lanes) each would have" in problem.message
        assert problem.hint.startswith(hint)
