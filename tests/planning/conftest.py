"""Plans are made of counted times, so that no clock decides what is quickest: a millisecond, a nanosecond for each FLOP."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def counted_times():
    """No step is timed (test_timing.py tests the clock), and a plan tries no smaller workspace unless a test lets it."""
    from ckptkern.planning import measure, search  # imports Triton, which tests/conftest.py sets up before

    watched = measure.watched_alone

    def watched_alone(*arguments):
        cost, held = watched(*arguments)
        return cost._replace(seconds=1e-3 + 1e-9 * cost.flops), held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "watched_alone", watched_alone)
        patch.setattr(measure, "ROUNDS", 0)
        patch.setattr(search, "SMALLER", 0)
        yield
