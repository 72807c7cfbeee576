"""ckptkern.certify: a right model passes and a wrong one does not. tests/planning/test_plan.py has that it stays as it is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ckptkern
from ckptkern.planning.certify import InFloat64


class Model(nn.Module):
    """Two MLPs with a norm that upcasts, as transformers' do, and a loss of labels."""

    def __init__(self, dropout=0.0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 8)
        self.to(dtype)

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = x + layer(F.layer_norm(x.float(), (16,)).to(x.dtype))
        y = self.head(x)
        return {"y": y} if labels is None else {"loss": F.cross_entropy(y.float(), labels), "y": y}


X, LABELS = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 8


@pytest.mark.parametrize(("converted", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_right_model_passes(converted, dtype):
    model = Model(dtype=dtype).eval()
    x = X.to(dtype)
    if converted:
        ckptkern.convert(model, x, labels=LABELS)
    forwards = [m.__dict__.get("forward") for m in model.modules()]
    certificate = ckptkern.certify(model, x, labels=LABELS)
    assert certificate.passed, str(certificate)
    assert {row.name for row in certificate.gradients} == dict(model.named_parameters()).keys()
    assert all(0 < row.eager < 16 * torch.finfo(dtype).eps for row in certificate.gradients)
    assert {"layers.0", "layers.1"} <= certificate.replaced.keys()
    assert certificate.saved[1] < certificate.saved[0]
    assert certificate.dropout
    assert [m.__dict__.get("forward") for m in model.modules()] == forwards


@pytest.mark.parametrize("fault", ["weight", "output", "nan"])
def test_a_wrong_one_does_not_pass(fault, monkeypatch):
    def wrong(x, *args, **kwargs):
        if fault == "weight":  # a gradient alone
            name = next(name for name, value in kwargs.items() if name.endswith("weight") and value is not None)
            kwargs[name] = kwargs[name] * 1.0
            kwargs[name].register_hook(lambda grad: 1.001 * grad)
        return right(x, *args, **kwargs) * {"weight": 1.0, "output": 1.001, "nan": float("nan")}[fault]

    model = Model()
    ckptkern.convert(model, X, labels=LABELS)
    op = next(iter(model.layers[0].forward.segments.values())).op
    right = getattr(ckptkern.ops, op)
    monkeypatch.setattr(ckptkern.ops, op, wrong)
    certificate = ckptkern.certify(model, X, labels=LABELS)
    assert not certificate.passed
    assert {"weight": set(certificate.failures) < {row.name for row in certificate.gradients}}.get(
        fault, "loss" in certificate.failures
    )
    assert certificate.failures
    assert str(certificate).startswith("FAILED\nerrors too large: ")


def test_a_replacement_that_does_not_run_does_not_pass():
    model = Model()
    ckptkern.convert(model, X, labels=LABELS)
    forward = model.layers[1].forward
    forward.segments = {"another pattern": next(iter(forward.segments.values()))}
    with pytest.warns(UserWarning, match="runs its original forward"):
        certificate = ckptkern.certify(model, X, labels=LABELS)
    assert certificate.unused == ["layers.1"]
    assert not certificate.passed
    assert "replaced, but ran as before convert: layers.1" in str(certificate)


def test_nothing_replaced_does_not_pass_and_without_dropout_it_does():
    certificate = ckptkern.certify(nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), X)
    assert not certificate.passed
    assert "nothing was replaced" in str(certificate)
    certificate = ckptkern.certify(Model(0.5), X, labels=LABELS)
    assert (certificate.passed, certificate.dropout) == (True, False)
    assert "dropout: off" in str(certificate)


def test_the_report_and_a_loss_of_ones_own(tmp_path):
    certificate = ckptkern.certify(Model(), X, loss=lambda output: output["y"].square().mean())
    assert certificate.passed
    certificate.write(tmp_path / "certificate.md")
    text = (tmp_path / "certificate.md").read_text()
    assert text.startswith("# passed: ")
    assert all(f"\n{row.name} " in text for row in certificate.gradients)
    assert "gradient of" in text.partition("```text\n")[2].partition("```")[0]


def test_float64_is_not_rounded():
    """With a norm in float32 the reference itself would be wrong by float32's rounding."""
    model, flat = Model().double(), {}
    for inside in (True, False):
        with InFloat64() if inside else torch.no_grad():
            flat[inside] = model(X.double())["y"].detach()
    assert 1e-9 < float((flat[True] - flat[False]).abs().max()) < 1e-5


class Odd(nn.Linear):
    def __init__(self, how):
        super().__init__(16, 16)
        self.how = how

    def forward(self, x):
        if self.how == "no float64" and x.dtype == torch.float64:
            raise RuntimeError(self.how)
        return super().forward(x) + (torch.rand(()) if self.how == "random" else 0)


def test_what_it_refuses():
    bad = Model()
    bad.held = nn.Parameter(torch.ones(2)) * 2
    for error, match, *arguments in (
        (TypeError, r"model must be a torch\.nn\.Module, not int", 1, X),
        (TypeError, "example inputs are missing", Model()),
        (ValueError, "two calls of the model in eval mode give different", Odd("random"), X),
        (ValueError, "the unmodified model does not run in float64: RuntimeError: no float64", Odd("no float64"), X),
        (ValueError, "the model cannot be copied: ", bad, X),
        (ValueError, "wanted an output with a gradient", Model().requires_grad_(False), X),
    ):
        with pytest.raises(error, match=f"certify: {match}"):
            ckptkern.certify(*arguments)
