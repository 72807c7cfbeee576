"""`make bench-host` measures every ratio and compares it with its bound. No ratio is asserted, because it is one of times."""

import functools
import re
import sys

import pytest

from benchmarks.dev import host


def test_every_ratio_is_measured_and_reported(monkeypatch, capsys):
    monkeypatch.setattr(host, "_medians", functools.partial(host._medians, rounds=2))
    monkeypatch.setattr(sys, "argv", ["host", "--tries", "1"])
    host.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["fused", "general", "eager_mlp", "guard", "conversion"]
    for line in lines:
        verdict, bound, ratio = re.fullmatch(r"\w+ +(within|ABOVE) ([\d.]+): (-?[\d.]+)", line).groups()
        if float(ratio) != float(bound):  # as printed, rounded
            assert verdict == ("within" if float(ratio) < float(bound) else "ABOVE")


@pytest.mark.parametrize(("least", "verdict"), [(0.4, "within 0.50"), (0.6, "ABOVE 0.50")])
def test_the_least_of_the_tries_is_compared(monkeypatch, capsys, least, verdict):
    ratios = iter([0.9, least, 0.8])

    def fused() -> float:
        return next(ratios)

    monkeypatch.setattr(host, "BOUNDS", {fused: 0.5})
    monkeypatch.setattr(sys, "argv", ["host", "--tries", "3"])
    host.main()
    assert capsys.readouterr().out.splitlines()[1] == f"fused      {verdict}: 0.900, {least:.3f}, 0.800"
