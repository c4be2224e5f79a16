"""Models that cannot be built say what would work."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import ConfigError
from tests.train.model.small import small


@pytest.mark.parametrize(
    ("change", "setting", "says"),
    [
        ({"pattern": ""}, "model.pattern", "is empty"),
        ({"pattern": "*-*E"}, "model.pattern", "'E' (mixture of experts) comes in a later version"),
        ({"pattern": "M-"}, "model.pattern", "'M' (Mamba-2) comes in a later version"),
        ({"pattern": "*x"}, "model.pattern", "'x' is no layer"),
        ({"hidden": 30, "head_dim": None}, "model.hidden", "24 or 32"),
        ({"num_kv_heads": 3}, "model.num_kv_heads", "choose one of 1, 2, 4, 8"),
        ({"head_dim": 5}, "model.head_dim", "set it to 6"),
        ({"vocab_size": 0}, "model.vocab_size", "it must be 1 or more"),
        ({"compute_dtype": "float23"}, "model.compute_dtype", "did you mean 'float32'?"),
        ({"remat": "ligth"}, "model.remat", "did you mean 'light'?"),
        ({"attention": "cudnn"}, "model.attention", "cannot compute in float32"),
        ({"rope_theta": 0.0}, "model.rope_theta", "it must be positive"),
        ({"loss_chunk": -1}, "model.loss_chunk", "it must be 0 or more"),
    ],
)
def test_a_wrong_setting_says_what_would_work(change: dict[str, Any], setting: str, says: str) -> None:
    problems = small(**change).problems()
    assert [problem.setting for problem in problems] == [setting]
    assert says in str(problems[0])
    with pytest.raises(ConfigError, match=setting):
        small(**change).build()


def test_all_mistakes_are_told_at_once() -> None:
    problems = small(pattern="E?", hidden=0, layers="stacked").problems()
    assert len(problems) == 4
