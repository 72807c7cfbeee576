"""``python -m ckptkern selftest`` passes here, and each of its checks can fail."""

import argparse
import functools
import itertools
import re
import subprocess

import emulator
import pytest
import torch
from support import outside

from ckptkern import eager, ops, state
from ckptkern.tools import selftest


@pytest.fixture(autouse=True)
def eager_only(monkeypatch):
    """Interpreted kernels have tests of their own, and would take a minute."""
    monkeypatch.setattr(selftest, "available_backends", lambda: [("cpu", "eager")])


def run(capsys, quiet=True):
    return selftest.main(argparse.Namespace(quiet=quiet, emulated=False)), capsys.readouterr().out


def faults(results):
    return [fault for _, fault in results if fault]


def test_passes_and_says_what_it_checked(capsys):
    before = torch.random.get_rng_state()
    status, printed = run(capsys, quiet=False)
    assert status == 0, printed
    assert torch.equal(before, torch.random.get_rng_state())
    lines = printed.splitlines()
    assert lines[0] == "versions"
    assert f"torch: {torch.__version__}" in printed
    assert "FAIL" not in printed
    checked = [line for line in lines if line.startswith("ok   ")]
    assert lines[-1].startswith(f"all {len(checked)} checks passed")
    for name in (*selftest.OPS, "dropout", "Philox4x32-10", "mask of the extension"):
        assert any(name in line for line in checked), name


def test_on_a_gpu_what_runs_by_default_is_checked_too(monkeypatch):
    ran = []
    monkeypatch.setattr(selftest, "available_backends", lambda: [("cuda", "triton")])
    for name in ("check_masks", "check_dropout", "check_op"):
        monkeypatch.setattr(selftest, name, lambda *arguments, name=name: ran.append((name, *arguments[-2:])) or [])
    for check in selftest.checks():
        list(check)
    of_ops = [call[1:] for call in ran if call[0] == "check_op"]
    assert of_ops.count(("cuda", "auto")) == of_ops.count(("cuda", "triton")) == len(of_ops) / 2 > 0
    assert ran.count(("check_dropout", "cuda", "triton")) == 1


def wrong_gradient(monkeypatch):
    def wrong(dy, z):
        return dy * (z > 0)

    monkeypatch.setitem(eager.ACTIVATIONS, "gelu", eager.ACTIVATIONS["gelu"]._replace(grad=wrong, grad_=wrong))


def check_that_raises(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")
        yield

    monkeypatch.setattr(selftest, "check_dropout", broken)


@pytest.mark.parametrize(
    ("inject", "message", "last"),
    [
        (wrong_gradient, "FAIL mlp gelu full, float32, cpu eager", "checks FAILED"),
        (check_that_raises, "RuntimeError: no such kernel", "\n1 of "),
    ],
)
def test_a_fault_fails_and_the_rest_goes_on(inject, message, last, monkeypatch, capsys):
    inject(monkeypatch)
    status, printed = run(capsys)
    assert status == 1
    assert message in printed
    assert last in printed
    assert "mlp relu" not in printed


def test_a_backend_that_there_is_not_fails(monkeypatch, capsys):
    """The check fails with the error that every layer then raises."""
    monkeypatch.setattr(selftest._choices._choice, "backend", "foo")
    with pytest.raises(ValueError, match="CKPTKERN_BACKEND") as raised:
        ops.dropout(torch.ones(3), 0.5)
    status, printed = run(capsys)
    assert status == 1
    assert str(raised.value).partition(": ")[2] in printed
    assert printed.splitlines()[-1].startswith("1 of ")
    monkeypatch.setattr(selftest._choices._choice, "backend", "triton")  # covers no CPU tensor, and need not
    assert run(capsys)[0] == 0


MASKS, KEEP, DROPOUT = state._keep_mask_torch, selftest.keep_mask, eager.dropout
CALLS = itertools.count()
INJECTED = {  # a check, and what is wrong
    "declared are 7": ("op", selftest, "saved_bytes", lambda module, x: 7 if x.is_meta else 8),
    # 9 / 65536 of the 36400 elements
    "other bits": ("masks", state, "_keep_mask_torch", lambda key, threshold, *place: MASKS(key, threshold + 9, *place)),
    "other values than 0xe8d5": ("philox", selftest, "keep_mask", lambda key, threshold, *sizes: KEEP(key, 32768, *sizes)),
    "bits": ("masks", eager, "dropout", lambda x, *args, row_base: DROPOUT(x, *args, row_base=16)),
    "backward's mask is not forward's": (
        "dropout", eager, "dropout", lambda x, *args, **_: DROPOUT(x, *args, row_base=16 * next(CALLS))
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", INJECTED)
def test_each_check_can_fail(fault, monkeypatch):
    name, *injected = INJECTED[fault]
    check = {
        "op": functools.partial(selftest.check_op, "mlp", "gelu", torch.float32, "cpu", "eager"),
        "masks": functools.partial(selftest.check_masks, [("cpu", "eager")]),
        "philox": selftest.check_philox,
        "dropout": functools.partial(selftest.check_dropout, "cpu", "eager"),
    }[name]
    assert not faults(check())
    monkeypatch.setattr(*injected)
    assert fault in " ".join(faults(check()))


@pytest.mark.parametrize(("last", "right"), [(1, True), (1 + 2e-7, False), (float("nan"), False), (None, False)])
def test_the_rule(last, right):
    y, exact = None if last is None else torch.tensor([1, 1, last]), {"y": torch.ones(3, dtype=torch.float64)}
    ratio, _ = selftest.error_ratio(selftest.relative_errors({"y": y}, exact), {"y": 3e-8}, torch.float32)
    assert (ratio <= 2) == right


@pytest.mark.long  # test_passes_and_says_what_it_checked runs these on the CPU, one after another
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "activation"), selftest.CASES)
def test_an_op_passes_on_each_backend(name, activation, dtype, device):
    """What `selftest` checks on a GPU, an op at a time, because each compiles kernels of its own."""
    for backend in ("eager", "triton") if device == "cuda" else ("eager",):
        assert not faults(selftest.check_op(name, activation, dtype, device, backend))


def test_masks_pass_on_each_backend(device):
    pairs = [(device, "eager"), (device, "triton")]
    assert not faults(selftest.check_masks(pairs))
    for pair in pairs:
        assert not faults(selftest.check_dropout(*pair))


@pytest.mark.slow
def test_compiled_kernels_on_any_machine():
    """In a process of its own: here kernels are interpreted, and that is said."""
    process = outside.start("-m", "ckptkern", "selftest", "--emulated", "--quiet", stdout=subprocess.PIPE)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert re.fullmatch(r"all 12 checks passed in \d+ s", out.strip())


def test_compiled_kernels_need_a_process_that_does_not_interpret(capsys):
    assert selftest.main(argparse.Namespace(quiet=True, emulated=True)) == 1
    assert "use a process without TRITON_INTERPRET=1" in capsys.readouterr().out


def test_a_fault_of_a_compiled_kernel_fails(monkeypatch, capsys):
    def emulated(arch):
        raise emulator.Fault("race", "read at what thread 3 wrote", "kernel.py:7")

    monkeypatch.setattr("emulator.emulated.emulated", emulated)
    assert selftest.main(argparse.Namespace(quiet=True, emulated=True)) == 1
    assert "Fault: race: read at what thread 3 wrote [kernel.py:7]" in capsys.readouterr().out
