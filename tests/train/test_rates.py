"""Learning rates equal the published formulas, which are evaluated here in 50 digits, to float precision."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext

import pytest

from holdfast.train.rates import RateConfig

D = Decimal
PI = D("3.14159265358979323846264338327950288419716939937510")
ULP = D("4e-16")


def cos(angle: Decimal) -> Decimal:
    """Its Taylor series; 50 digits for 0 to π."""
    term, total, k = D(1), D(1), 0
    while abs(term) > D("1e-52"):
        k += 2
        term *= -angle * angle / (k * (k - 1))
        total += term
    return total


def half_cosine(ratio: Decimal) -> Decimal:
    return (1 + cos(PI * ratio)) / 2


LEFT: dict[str, Callable[[Decimal], Decimal]] = {
    "linear": lambda ratio: 1 - ratio,
    "cosine": half_cosine,
    "exponential": lambda ratio: 2 * D("0.5") ** ratio - 1,
    "minus_sqrt": lambda ratio: 1 - ratio.sqrt(),
}


def published(config: RateConfig, n: int, end: int) -> Decimal:
    """megatron-core's rules, from their description: warm-up, then a share of the way from peak to floor."""
    peak, floor, start = D(config.peak), D(config.floor), D(config.start)
    if config.warmup and n <= config.warmup:
        return start + (peak - start) * n / config.warmup
    if config.shape == "constant":
        return peak
    last = config.decay or end
    if n > last:
        return floor
    if config.shape == "inverse_sqrt":
        return max(floor, peak * D(config.warmup).sqrt() / D(n).sqrt())
    if config.shape == "wsd":
        left = last - config.wsd_decay
        share = D(1) if n <= left else LEFT[config.wsd_shape](D(n - left) / config.wsd_decay)
    else:
        share = LEFT[config.shape](D(n - config.warmup) / (last - config.warmup))
    return floor + share * (peak - floor)


RUNS = [
    *(
        RateConfig(peak=3e-4, floor=3e-5, warmup=1000, shape=shape)
        for shape in ("constant", "linear", "cosine")
    ),
    RateConfig(peak=6e-4, floor=1e-5, warmup=2000, shape="inverse_sqrt"),
    RateConfig(peak=1e-3, start=1e-6, warmup=777, decay=15_000, floor=1e-4),
    RateConfig(peak=1e-3, warmup=0, shape="linear"),
    *(
        RateConfig(peak=2e-3, floor=2e-5, warmup=500, shape="wsd", wsd_decay=4000, wsd_shape=shape)
        for shape in LEFT
    ),
]


@pytest.mark.parametrize(
    "config", RUNS, ids=lambda config: f"{config.shape}-{config.wsd_shape}-{config.warmup}"
)
def test_values_are_those_of_the_published_formulas(config: RateConfig) -> None:
    end = 20_000
    assert config.problems(end, 0.1) == []
    with localcontext() as context:
        context.prec = 60
        for n in [*range(0, 21_000, 37), 500, 501, 1000, 1001, 16_000, 16_001, end, end + 1]:
            want, have = published(config, n, end), D(config.at(n, end))
            # A share near 0 comes from a subtraction from 1: its error counts against the peak.
            assert abs(have - want) <= ULP * D(config.peak), n


def test_half_way_through_a_decay() -> None:
    shares = {
        shape: RateConfig(peak=1.0, shape="wsd", wsd_decay=100, wsd_shape=shape).at(950, 1000)
        for shape in LEFT
    }
    assert shares == pytest.approx(
        {"linear": 0.5, "cosine": 0.5, "exponential": 0.4142135623730951, "minus_sqrt": 0.2928932188134524}
    )


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_weight_decay_rises_to_that_of_the_optimizer(shape: str) -> None:
    config = RateConfig(peak=1e-3, wd_start=0.02, wd_ramp=1000, wd_shape=shape)
    with localcontext() as context:
        context.prec = 60
        for n in range(0, 1001, 50):
            ratio = D(n) / 1000
            share = ratio if shape == "linear" else half_cosine(1 - ratio)
            want = D(0.02) + share * (D(0.1) - D(0.02))
            assert abs(D(config.weight_decay_at(n, 0.1)) - want) <= ULP
    assert config.weight_decay_at(1001, 0.1) == 0.1
    assert RateConfig(peak=1e-3).weight_decay_at(0, 0.1) == 0.1


@pytest.mark.parametrize(
    ("config", "setting", "says"),
    [
        (RateConfig(peak=0.0), "rate.peak", "more than 0"),
        (RateConfig(peak=float("nan")), "rate.peak", "more than 0"),
        (RateConfig(peak=1e-3, floor=2e-3), "rate.floor", "more than the peak of 0.001"),
        (RateConfig(peak=1e-3, start=2e-3), "rate.start", "more than the peak"),
        (RateConfig(peak=1e-3, warmup=1000), "rate.warmup", "nothing is left to decay in"),
        (RateConfig(peak=1e-3, warmup=50, decay=40), "rate.warmup", "rate.decay=40"),
        (RateConfig(peak=1e-3, warmup=-1), "rate.warmup", "0 or more"),
        (RateConfig(peak=1e-3, shape="cosin"), "rate.shape", "did you mean 'cosine'"),
        (RateConfig(peak=1e-3, shape="inverse_sqrt"), "rate.warmup", "inverse_sqrt"),
        (RateConfig(peak=1e-3, shape="wsd"), "rate.wsd_decay", "1 to 1000"),
        (RateConfig(peak=1e-3, shape="wsd", warmup=100, wsd_decay=901), "rate.wsd_decay", "1 to 900"),
        (RateConfig(peak=1e-3, wsd_shape="step"), "rate.wsd_shape", "choose one of"),
        (RateConfig(peak=1e-3, wd_ramp=10, wd_start=0.2), "rate.wd_start", "optimizer.weight_decay=0.1"),
        (RateConfig(peak=1e-3, wd_shape="constant"), "rate.wd_shape", "linear, cosine"),
    ],
)
def test_mistakes_name_the_setting(config: RateConfig, setting: str, says: str) -> None:
    problems = config.problems(1000, 0.1)
    assert [problem.setting for problem in problems] == [setting]
    assert says in str(problems[0])
