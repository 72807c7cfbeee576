"""`make bench-host` measures every ratio and compares it with its bound. No ratio is asserted, because it is one of times."""

import functools
import re
import sys

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
