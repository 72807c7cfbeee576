"""moe_block: what a router adds to experts, which are its logits and the choice that backward must not make again."""

import pytest
import torch
import torch.nn.functional as F
from support.cases import DTYPES, assert_same_within_rounding, check_exactness, gradients, output_gradient
from support.oracles import ORACLES, chosen
from support.properties import TAILS, Case, joined, many

import ckptkern
from ckptkern.ops import catalog
from ckptkern.ops.moe.sublayer import MoESublayer

E, D = 6, 24
ENTRY = catalog.OPS["moe_block"]
ROUTER = {"top_k": 2, "score_bias": None, "num_groups": 1, "top_groups": None, "group_score": "top2"}
Tensors = dict[str, torch.Tensor]


def tensors_of(dtype=torch.float64, lead=(50,)) -> Tensors:
    """The router's and the experts' tensors."""
    return catalog.random_leaves(ENTRY.inputs(catalog.Sizes(lead, D, 20, experts=E)), dtype)


@pytest.mark.parametrize("workspace", [2**40, 1])
@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_takes_forwards_choice(create_graph, workspace, monkeypatch):
    """Logits that round otherwise in recompute change no choice: all experts are nearly alike to this router. Of second order,
    too, whose reference implementation forms logits of its own."""
    t = tensors_of(lead=(300,))
    with torch.no_grad():
        t["router_weight"] *= 1e-6
    noise = 1e-4 * torch.randn(300, E, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    of_rows = MoESublayer.logits
    with monkeypatch.context() as patch:
        patch.setattr(MoESublayer, "logits", lambda self, h: of_rows(self, h) + noise[self.first_row :][: h.shape[0]])
        ours = ckptkern.moe_block(**t, top_k=3, workspace=workspace)
    index, anew = (logits.topk(3, -1)[1] for logits in (ours[1], F.linear(t["x"], t["router_weight"])))
    assert (index.sort().values != anew.sort().values).any(-1).double().mean() > 0.5

    def orders(results: tuple[torch.Tensor, torch.Tensor]) -> Tensors:
        """The gradients, and one of their squares' sum."""
        grads = torch.autograd.grad(
            results, list(t.values()), list(map(output_gradient, results)), create_graph=create_graph
        )
        found = dict(zip(t, grads, strict=True))
        if create_graph:
            found["second"] = torch.autograd.grad(sum(one.square().sum() for one in grads), t["down_weight"])[0]
        return found

    found = orders(ours)
    for name, want in orders(ORACLES["moe_block"](**t, top_k=3, index=index)).items():
        error = ((found[name] - want).abs().max() / want.abs().max()).item()
        assert error < 1e-3, f"the gradient of {name} is wrong by {error:.3g} of its largest number"


@pytest.mark.parametrize("lead", [(50,), (2, 3), (0,), ()], ids=str)
def test_the_logits_alone_have_a_gradient(lead):
    """One of the input and the router. They have a row for each token."""
    t = tensors_of(lead=lead)
    found = gradients(lambda t: ckptkern.moe_block(**t, top_k=2)[1], t)
    read = {name: t[name] for name in ("x", "router_weight")}
    expected = gradients(lambda t: F.linear(t["x"].reshape(-1, D), t["router_weight"]), read)
    assert_same_within_rounding({name: found.pop(name) for name in expected}, expected)
    for name, grad in found.items():
        assert not grad.any(), name


CASES = [(options, dtype) for options in ((), *many("moe_block")) for dtype in DTYPES]


@pytest.mark.parametrize(
    ("options", "dtype"), CASES, ids=[f"{len(options)} options-{dtype}" for options, dtype in CASES]
)
def test_as_exact_as_eager_pytorch(options, dtype):
    """y, the logits and gradients, with one choice of experts for all: that of our own logits."""
    case = Case(ENTRY, options, "full", TAILS)
    arguments, choices = case.arguments, []
    router = [arguments.get(name, default) for name, default in ROUTER.items()]

    def ours(t: Tensors) -> torch.Tensor:
        results = case.results(t)
        scores = results[1].detach().to(torch.promote_types(results[1].dtype, torch.float32))
        scores = scores.sigmoid() if arguments.get("scoring") == "sigmoid" else scores.softmax(-1)
        choices.append((t["x"].detach().double(), chosen(scores, *router)))
        return joined(results)

    def theirs(t: Tensors) -> torch.Tensor:
        index = next(index for x, index in choices if torch.equal(x, t["x"].double()))
        return joined(case.oracle(t, index=index))

    check_exactness(ours, theirs, case.make(dtype))
