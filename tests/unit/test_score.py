"""Scores count everything, and their intervals are the textbook's."""

import pytest
from scipy.stats import binomtest

from wherry.eval.score import line, mean_interval, summarise, wilson


def item(value, answer="x", stop="stop", error=None):
    return {"id": 1, "epoch": 1, "value": value, "answer": answer, "stop_reason": stop, "error": error}


def outcome(*items):
    return {
        "task": "t",
        "dataset_size": 10,
        "sampling": {},
        "inspect_ai": "0",
        "log": "l",
        "items": list(items),
    }


@pytest.mark.parametrize(("successes", "n"), [(32, 698), (0, 10), (10, 10), (5, 10), (1, 1), (119, 120)])
def test_wilson_is_that_of_scipy(successes, n):
    expected = binomtest(successes, n).proportion_ci(method="wilson")
    assert wilson(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_nothing_leaves_the_denominator():
    result = summarise(
        outcome(
            item(1.0),
            item(0.0),
            item(0.0, answer=None),
            item(0.0, answer="", stop="max_tokens"),
            item(None, answer=None, stop=None, error="refused"),
        )
    )
    assert (result["n"], result["N"], result["score"]) == (5, 10, 0.2)
    assert (result["truncated"], result["unparsed"], result["errors"]) == (1, 2, 1)
    assert result["interval"] == list(wilson(1, 5))
    assert line(result).startswith("t: 20.0 % [3.6, 62.4] (Wilson 95 %, 5 of 10 items; 1 truncated")


def test_graded_scores_get_a_mean_interval():
    result = summarise(outcome(item(0.5), item(1.0), item(0.75)))
    assert result["score"] == 0.75
    # standard error of (0.5, 1, 0.75): 0.25 / sqrt(3)
    assert result["interval"] == pytest.approx([0.75 - 1.96 * 0.1443, 0.75 + 1.96 * 0.1443], abs=1e-3)
    assert mean_interval([0.4]) == (0.4, 0.4)
