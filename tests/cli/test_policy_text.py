"""The little language of `prune --keep`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import Policy, best, every, everything, latest, within
from holdfast.cli.policy_text import joined, parsed
from holdfast.errors import UsageError


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("latest(3)", latest(3)),
        ("  latest( 3 ) ", latest(3)),
        ("3", latest(3)),
        ("every(1_000)", every(1000)),
        ("every(64, unit='samples')", every(64, unit="samples")),
        ('best(2,"loss")', best(2, "loss")),
        ('best(2, "acc", highest=True)', best(2, "acc", highest=True)),
        ("within(86400)", within(86400)),
        ("within(1e5, spacing_s=60)", within(1e5, spacing_s=60)),
        ("everything()", everything()),
        ("latest(3)|every(1000)", latest(3) | every(1000)),
        ('latest(3)|every(1000)|best(2,"loss")', latest(3) | every(1000) | best(2, "loss")),
        ("latest(3) | (every(5) | within(9))", latest(3) | every(5) | within(9)),
    ],
)
def test_what_is_accepted(text: str, policy: Policy) -> None:
    assert joined(parsed(text)) == policy


def test_rules_keep_their_words_and_order() -> None:
    assert [rule.text for rule in parsed('latest(3)|every( 9 )|best(2,"a")')] == [
        "latest(3)",
        "every(9)",
        "best(2, 'a')",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "cannot read the policy"),
        ("latest(3", "cannot read the policy"),
        ("latest(3) every(2)", "cannot read the policy"),
        ("latest(3); every(2)", "cannot read the policy"),
        ("latest(3)\0", "cannot read the policy"),
        ("lates(3)", "there is no rule 'lates'"),
        ("latest(3) & every(2)", "is not a rule"),
        ("latest(3) or every(2)", "is not a rule"),
        ("latest", "is not a rule"),
        ("'latest(3)'", "is not a rule"),
        ("True", "is not a rule"),
        ("latest()", "missing a required argument"),
        ("latest(3, 4)", "too many positional arguments"),
        ("latest(n=3)", "unexpected keyword|missing a required argument"),
        ("latest(0)", "a positive whole number is needed"),
        ("latest(-1)", "is not a plain number or word"),
        ("latest(True)", "count is True, not int"),
        ("latest(3.5)", "count is 3.5, not int"),
        ("latest('3')", "count is '3', not int"),
        ("best(2, 5)", "metric is 5, not str"),
        ("best(2, 'a', highest=1)", "highest is 1, not bool"),
        ("every(5, unit='days')", "unit 'days' is unknown"),
        ("within(0)", "keeps nothing"),
        ("within(None)", "seconds is None"),
        ("latest(*[3])", "is not a plain number or word"),
        ("latest(**{'count': 3})", "is not a plain number or word"),
        ("latest(2 + 1)", "is not a plain number or word"),
        ("latest(f'{3}')", "is not a plain number or word"),
        ("latest(len('abc'))", "is not a plain number or word"),
        ("__import__('os').system('true')", "is not a rule"),
        ("__import__('os')", "there is no rule '__import__'"),
        ("(lambda: latest(3))()", "is not a rule"),
        ("[latest(3) for x in y]", "is not a rule"),
        ("latest(3) " * 300, "at most 2,000 are read"),
        ("(" * 900, "cannot read the policy"),
    ],
)
def test_what_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        parsed(text)
    assert caught.value.hint is not None


@pytest.mark.parametrize("text", ["0", "latest(0)", "within(0)", "every(0)", "best(0, 'loss')"])
def test_a_rule_that_keeps_nothing_is_refused_with_the_rules_that_there_are(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(text)
    assert caught.value.hint is not None
    assert "latest(3)" in caught.value.hint


def test_a_near_miss_is_pointed_out() -> None:
    with pytest.raises(UsageError) as caught:
        parsed("lastest(3)")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("did you mean latest?")


@given(st.text(max_size=60) | st.text("latesvrybwihn()|,'\"=0123_ ", max_size=60))
def test_any_text_gives_rules_or_a_usage_error(text: str) -> None:
    try:
        rules = parsed(text)
    except UsageError:
        return
    assert rules
