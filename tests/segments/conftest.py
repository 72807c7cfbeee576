"""What torch logs with debug=True is not a format string."""

import logging
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _debug_logs_anything():
    """pytest's log capture would take it as an error. torch stops its logger from propagating, for good; pytest then attaches
    its capture to that logger in the next test."""
    with mock.patch.object(logging.getLogger("LoggingTensor"), "propagate", True):
        yield
