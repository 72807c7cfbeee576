"""moe_block: what a router adds to experts, which are its logits and the choice that backward must not make again."""

import pytest
import torch
import torch.nn.functional as F
from support import catalog, oracles
from support.cases import DTYPES, Tensors, assert_same_within_rounding, check_exactness, clone, gradients
from support.catalog import Sizes
from support.properties import TAILS, Case, call_of, joined, many, outcome

from ckptkern.ops.moe import MoESublayer

E, D = 6, 24
ENTRY = catalog.OPS["moe_block"]
ROUTER = {"top_k": 2, "score_bias": None, "num_groups": 1, "top_groups": None, "group_score": "top2"}


@pytest.mark.parametrize("workspace", [2**40, 1])
@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_takes_forwards_choice(create_graph, workspace, monkeypatch):
    """Logits that round otherwise in recompute change no choice: all experts are nearly alike to this router. Of second order,
    too, whose reference implementation forms logits of its own."""
    call = call_of("moe_block", sizes=Sizes((300,), D, 20, experts=E), top_k=3)
    t = call.make(torch.float64)
    with torch.no_grad():
        t["router_weight"] *= 1e-6
    noise = 1e-4 * torch.randn(300, E, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    of_rows = MoESublayer.logits
    with monkeypatch.context() as patch:
        patch.setattr(MoESublayer, "logits", lambda self, h: of_rows(self, h) + noise[self.first_row :][: h.shape[0]])
        ours = call.results(t, workspace=workspace)
    index, anew = (logits.topk(3, -1)[1] for logits in (ours[1], F.linear(t["x"], t["router_weight"])))
    assert (index.sort().values != anew.sort().values).any(-1).double().mean() > 0.5

    def orders(results: list[torch.Tensor]) -> Tensors:
        """The gradients, and one of their squares' sum."""
        outcomes = outcome(results, t, create_graph=create_graph)
        if create_graph:
            squares = sum(outcomes[name].square().sum() for name in t)
            outcomes["second"] = torch.autograd.grad(squares, t["down_weight"])[0]
        return outcomes

    actual = orders(ours)
    for name, want in orders(call.oracle(t, index=index)).items():
        error = ((actual[name] - want).abs().max() / want.abs().max()).item()
        assert error < 1e-3 or name == "result 1", f"{name} is wrong by {error:.3g} of its largest number"


@pytest.mark.parametrize("lead", [(50,), (2, 3), (0,), ()], ids=str)
def test_the_logits_alone_have_a_gradient(lead):
    """One of the input and the router. They have a row for each token."""
    call = call_of("moe_block", sizes=Sizes(lead))
    t = call.make()
    actual = gradients(lambda t: call.results(t)[1], t)
    read = {name: t[name] for name in ("x", "router_weight")}
    expected = gradients(lambda t: F.linear(t["x"].reshape(-1, 6), t["router_weight"]), read)
    assert_same_within_rounding({name: actual.pop(name) for name in expected}, expected)
    for name, grad in actual.items():
        assert not grad.any(), name


CASES = [(options, dtype) for options in ((), *many("moe_block")) for dtype in DTYPES]


@pytest.mark.parametrize(
    ("options", "dtype"), CASES, ids=[f"{len(options)} options-{dtype}" for options, dtype in CASES]
)
def test_as_exact_as_eager_pytorch(options, dtype):
    """y, the logits and gradients, with one choice of experts for all: that of our own logits."""
    case = Case(ENTRY, options, "full", TAILS)
    router = [case.arguments.get(name, default) for name, default in ROUTER.items()]

    def theirs(t: Tensors) -> torch.Tensor:
        logits = case.results(clone(t, dtype))[1].detach()
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = scores.sigmoid() if case.arguments.get("scoring") == "sigmoid" else scores.softmax(-1)
        return joined(case.oracle(t, index=oracles.chosen(scores, *router)))

    check_exactness(case, theirs, case.make(dtype))
