"""linear_distillation and linear_topk_distillation against F.kl_div of all logits: values, gradients, what is saved and held,
and arguments that are wrong."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from support.cases import DTYPES, assert_same_within_rounding, check_exactness, gradients
from support.drop_ins import pairwise
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import ckptkern
from ckptkern.memory import saved_tensors

BETAS = (0.0, 0.3, 1.0)
LEAD, WIDTH, TEACHERS, CLASSES, K = (5, 7), 33, 20, 300, 6


def make(dtype=torch.float32, bias=True, lead=LEAD, classes=CLASSES, seed=0):
    """(the student's tensors, the teacher's, a mask)."""
    generator = torch.Generator().manual_seed(seed)

    def model(width: int) -> dict[str, torch.Tensor]:
        shapes = {"input": (*lead, width), "weight": (classes, width)} | ({"bias": (classes,)} if bias else {})
        return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}

    student, teacher = model(WIDTH), model(TEACHERS)
    student["weight"] /= 3
    return (
        {name: one.requires_grad_() for name, one in student.items()},
        teacher,
        torch.rand(lead, generator=generator) > 0.3,
    )


def named(student, teacher):
    return {f"student_{name}": one for name, one in student.items()} | {
        f"teacher_{name}": t for name, t in teacher.items()
    }


def divergence(log_p, log_q, beta):
    """By the definitions, with torch's KL divergence, of each token."""

    def kl(of, to):
        return F.kl_div(to, of, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        return kl(log_p, log_q) if beta == 0 else kl(log_q, log_p)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def reduced(losses, mask, reduction):
    losses = losses if mask is None else losses * mask
    count = losses.numel() if mask is None else mask.sum()
    return losses if reduction == "none" else losses.sum() / (count if reduction == "mean" else 1)


def log_probabilities(t, temperature=1.0, softcap=None):
    z = F.linear(t["input"], t["weight"], t.get("bias"))
    z = z if z.dtype == torch.float64 else z.float()
    z = softcap * torch.tanh(z / softcap) if softcap else z
    return F.log_softmax(z / temperature, -1)


def unfused(
    teacher, student, *, beta=0.0, temperature=1.0, softcap=None, teacher_softcap=None, mask=None, reduction="mean", **_
):  # fmt: skip
    teacher = {name: one.to(student["input"].dtype) for name, one in teacher.items()}
    log_p, log_q = (
        log_probabilities(teacher, temperature, teacher_softcap),
        log_probabilities(student, temperature, softcap),
    )
    return reduced(divergence(log_p, log_q, beta), mask, reduction)


def fused(teacher, student, **options):
    return ckptkern.linear_distillation(**named(student, teacher), **options)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()


# -- values and gradients


@pytest.mark.parametrize(
    "case",
    pairwise(
        dtype=DTYPES, beta=BETAS, bias=(True, False), masked=(False, True), reduction=("mean", "sum", "none"),
        temperature=(1.0, 2.0), softcap=(None, 3.0), teacher_softcap=(None, 2.0), workspace=(None, 1),
    ),
)  # fmt: skip
def test_as_exact_as_pytorch(case):
    """Every pair of options; chunks of 16 tokens, of which the last has three, and of 256 classes, the last with 44."""
    case = dict(case)
    student, teacher, mask = make(case.pop("dtype"), case.pop("bias"))
    case["mask"] = mask if case.pop("masked") else None
    check_exactness(functools.partial(fused, teacher, **case), functools.partial(unfused, teacher, **case), student)


@pytest.mark.parametrize("beta", BETAS)
def test_classes_that_a_bias_rules_out(beta):
    """Of both models, or of one whose divergence from the other is finite; no NaN, and no gradient for them."""
    student, teacher, _ = make()
    with torch.no_grad():
        student["bias"][100:] = -torch.inf
        teacher["bias"][90 if beta < 1 else 110 :] = -torch.inf
        if 0 < beta < 1:
            student["bias"][:50] = -torch.inf
    found = gradients(functools.partial(fused, teacher, beta=beta, reduction="none"), student)
    assert all(one.isfinite().all() for one in found.values())
    assert (found["weight"][110:] == 0).all()
    assert found["y"].min() > 0


@pytest.mark.parametrize(("beta", "most"), [(0.5, math.log(2)), (0.1, None)])
def test_models_that_agree_on_nothing(beta, most):
    """The bound of the Jensen-Shannon divergence, reached though logits differ by thousands."""
    x, weight = torch.eye(2)[:1].requires_grad_(), torch.tensor([[5000.0, 0.0], [0.0, 5000.0]])
    loss = ckptkern.linear_distillation(x, weight, x.detach().flip(-1), weight, beta=beta)
    most = most or -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    torch.testing.assert_close(loss.item(), most)
    (grad,) = torch.autograd.grad(loss, x)
    assert grad.abs().max() < 1e-6


def test_a_student_equal_to_its_teacher():
    """No loss and no gradient, also of a head that both share, which is trained as the student's alone."""
    student, _, _ = make(bias=False)
    for beta in BETAS:
        loss = ckptkern.linear_distillation(*student.values(), *student.values(), beta=beta)
        grads = torch.autograd.grad(loss, list(student.values()))
        assert abs(loss.item()) < 1e-6
        assert all(one.abs().max() < 1e-6 for one in grads)


def test_a_teacher_of_another_dtype_and_autocast():
    student, teacher, _ = make()
    half = {name: one.bfloat16().requires_grad_() for name, one in teacher.items()}
    found = gradients(functools.partial(fused, half), student)
    exact = {name: one.float() for name, one in half.items()}
    assert_same_within_rounding(found, gradients(functools.partial(fused, exact), student))
    assert half["weight"].grad is None
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused(teacher, student)
    cast = {name: one.bfloat16() for name, one in student.items()}
    assert torch.equal(loss, fused(half, cast))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(("lead", "classes"), [((0,), 12), ((), 12), ((2, 0), 3), ((3,), 0)])
def test_sizes_at_the_edge(lead, classes):
    """No tokens, one without leading dimensions, no classes."""
    student, teacher, _ = make(lead=lead, classes=classes)
    found = gradients(functools.partial(fused, teacher, beta=0.3, reduction="none"), student)
    assert_same_within_rounding(
        found, gradients(functools.partial(unfused, teacher, beta=0.3, reduction="none"), student)
    )


def test_a_frozen_quantised_teacher_and_student():
    """A teacher in four bits, and a student whose head is one, of which only the hidden states are trained."""
    student, teacher, _ = make(bias=False)
    raw = torch.randint(0, 256, (CLASSES, 1, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    head = ckptkern.Frozen(raw, torch.full((CLASSES, 1), 124, dtype=torch.uint8), kind="mxfp4", dtype=torch.float32)
    found, exact = (
        {"weight": one, "input": teacher["input"][..., :1].expand(*LEAD, 32)} for one in (head, head.dequantize())
    )
    assert_same_within_rounding(
        gradients(functools.partial(fused, found), student), gradients(functools.partial(fused, exact), student)
    )
    x = {"input": torch.randn(*LEAD, 32).requires_grad_()}
    ours, theirs = (
        gradients(lambda t, weight=weight: fused(teacher, t | {"weight": weight}, beta=0.3), x)
        for weight in (head, head.dequantize())
    )
    assert_same_within_rounding(ours, theirs)


# -- what it costs


@pytest.mark.parametrize(("beta", "numbers"), [(0.0, 2), (0.5, 3), (1.0, 3)])
def test_what_is_saved_and_run(beta, numbers):
    """Two or three numbers a token, nothing without gradients; four matmuls of the student's width and two of the teacher's."""
    student, teacher, _ = make()
    given = [*student.values(), *teacher.values()]
    with saved_tensors(exclude=given) as saved, FlopCounterMode(display=False) as counter:
        loss = fused(teacher, student, beta=beta)
        loss.backward()
    tokens = torch.Size(LEAD).numel()
    assert saved.bytes == 4 * numbers * tokens
    assert counter.get_total_flops() == 2 * tokens * CLASSES * (4 * WIDTH + 2 * TEACHERS)
    with saved_tensors() as saved, torch.no_grad():
        fused(teacher, student, beta=beta)
    assert saved.bytes == 0


def test_there_is_no_kernel():
    student, teacher, _ = make()
    with (
        ckptkern.backend("triton"),
        pytest.raises(
            RuntimeError, match=r"linear_distillation: backend\('triton'\) was asked for, but there is no kernel"
        ),
    ):
        fused(teacher, student)


# -- the k largest log-probabilities


def top_k(teacher, padded=False):
    """(log-probabilities, tokens); of every other token the last two are padding, as TRL's collator writes it."""
    log_probs, tokens = log_probabilities({name: t.double() for name, t in teacher.items()}).topk(K)
    if padded:
        log_probs[::2, :, -2:], tokens[::2, :, -2:] = -torch.inf, -1
    return log_probs, tokens


def of_k(
    teacher, student, *, beta=0.0, temperature=1.0, add_tail_bucket=True, padded=False, mask=None, reduction="mean", **_
):
    log_p, tokens = top_k(teacher, padded)
    log_q = log_probabilities(student, temperature)
    log_p, counted = log_p.to(log_q.dtype), tokens >= 0
    p, q = log_p.exp(), log_q.gather(-1, tokens.clamp_min(0)).exp() * counted
    if add_tail_bucket:
        p, q = (torch.cat([one, 1 - one.sum(-1, keepdim=True)], -1) for one in (p, q))
        counted = F.pad(counted, (0, 1), value=True)
    else:
        p, q = (one / one.sum(-1, keepdim=True) for one in (p, q))
    log_p, log_q = (torch.where(counted, one, 1.0).log() for one in (p, q))
    return reduced(divergence(log_p, log_q, beta), mask, reduction)


def fused_of_k(teacher, student, padded=False, **options):
    given = {f"student_{name}": one for name, one in student.items()}
    return ckptkern.linear_topk_distillation(
        **given, **dict(zip(("teacher_log_probs", "teacher_tokens"), top_k(teacher, padded), strict=True)), **options
    )


@pytest.mark.parametrize(
    "case",
    pairwise(
        dtype=DTYPES, beta=BETAS, bias=(True, False), masked=(False, True), reduction=("mean", "sum", "none"),
        temperature=(1.0, 2.0), add_tail_bucket=(True, False), padded=(False, True), workspace=(None, 1),
        backend=("eager", "triton"),
    ),
)  # fmt: skip
def test_top_k_as_exact_as_pytorch(case):
    """Against formulas in float64 that take the tail as what is left of one."""
    case = dict(case)
    backend = case.pop("backend")
    student, teacher, mask = make(case.pop("dtype"), case.pop("bias"))
    case["mask"] = mask if case.pop("masked") else None
    with ckptkern.backend(backend):
        check_exactness(
            functools.partial(fused_of_k, teacher, **case), functools.partial(of_k, teacher, **case), student
        )


def test_a_tail_bucket_is_at_most_the_whole_divergence_and_all_classes_are_it():
    student, teacher, _ = make(torch.float64)
    whole = fused(teacher, student, reduction="none")
    part = fused_of_k(teacher, student, reduction="none")
    assert (part <= whole).all()
    log_probs, tokens = log_probabilities(teacher).topk(CLASSES)
    given = student["input"], student["weight"], log_probs, tokens
    for add_tail_bucket in (True, False):
        every = ckptkern.linear_topk_distillation(
            *given, student_bias=student["bias"], add_tail_bucket=add_tail_bucket, reduction="none"
        )
        torch.testing.assert_close(every, whole)


def test_a_token_without_candidates_has_no_loss_and_no_gradient():
    """Its log-probabilities are padding, and its hidden state may be anything."""
    student, teacher, _ = make()
    log_probs, tokens = top_k(teacher)
    log_probs[2] = -torch.inf
    for add_tail_bucket in (True, False):
        loss = ckptkern.linear_topk_distillation(
            student["input"], student["weight"], log_probs, tokens, add_tail_bucket=add_tail_bucket, reduction="none"
        )
        (grad,) = torch.autograd.grad(loss.sum(), student["input"])
        assert (loss[2] == 0).all()
        assert (grad[2] == 0).all()
        assert (loss[[0, 1, 3, 4]] > 0).all()


def test_a_token_of_minus_100_is_padding():
    """Labels are padded so, and log-probabilities beside them with any number."""
    student, teacher, _ = make()
    log_probs, tokens = top_k(teacher)
    padding = torch.arange(K) % 3 == 1
    given = student["input"], student["weight"]
    for add_tail_bucket in (True, False):
        one, other = (
            ckptkern.linear_topk_distillation(*given, *pair, add_tail_bucket=add_tail_bucket)
            for pair in (
                (log_probs, tokens.masked_fill(padding, -100)),
                (log_probs.masked_fill(padding, -torch.inf), tokens),
            )
        )
        assert torch.equal(one, other)


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_for_every_number_of_tokens():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ckptkern.linear_distillation, backend=counter, fullgraph=True)
    for tokens in (5, 8, 3):
        student, teacher, mask = make(lead=(2, tokens))
        expected = gradients(lambda s, t=teacher, m=mask: fused(t, s, mask=m), student)
        found = gradients(lambda s, t=teacher, m=mask: compiled(**named(s, t), mask=m), student)
        assert_same_within_rounding(found, expected)
    assert counter.frame_count <= 2


# -- arguments


WRONG = {
    "beta": (dict(beta=1.5), ValueError, r"beta must be between 0 \(forward KL\) and 1 \(reverse KL\), not 1.5"),
    "temperature": (dict(temperature=0.0), ValueError, "temperature must be positive and finite, not 0.0"),
    "reduction": (dict(reduction="batchmean"), ValueError, "reduction must be one of 'none', 'mean', 'sum', not 'batchmean'"),
    "a mask of numbers": (dict(mask=torch.ones(LEAD)), TypeError, "mask must be bool, True for tokens that count, not"),
    "a mask's shape": (dict(mask=torch.ones(3).bool()), ValueError, r"mask must have shape \(5, 7\), but has \(3,\)"),
    "a mask that is none": (dict(mask=[True]), TypeError, "mask must be a Tensor, not list"),
    "workspace": (dict(workspace=0), ValueError, "workspace must be a positive number of bytes"),
}  # fmt: skip
OF_HEADS = {
    "softcap": (dict(softcap=math.inf), ValueError, "softcap must be positive and finite or None, not inf"),
    "a teacher's softcap": (dict(teacher_softcap=-1), ValueError, "teacher_softcap must be positive and finite or None"),
    "tokens": (
        dict(teacher_input=torch.zeros(5, 6, TEACHERS)), ValueError,
        r"teacher_input must have the student's leading shape \(5, 7\), but has \(5, 6\)",
    ),
    "classes": (
        dict(teacher_weight=torch.zeros(310, TEACHERS), teacher_bias=None), ValueError,
        "student_weight has 300 classes but teacher_weight has 310; .*: slice off rows that only pad it",
    ),
    "features": (
        dict(teacher_weight=torch.zeros(CLASSES, 9)), ValueError,
        "teacher_input has 20 features but teacher_weight has in_features=9",
    ),
    "no tensor": (dict(student_input=1.0), TypeError, "student_input must be a Tensor, not float"),
}  # fmt: skip
OF_K = {
    "log-probabilities": (
        dict(teacher_log_probs=torch.zeros(5, K)), ValueError,
        r"teacher_log_probs must have shape \(5, 7, 'k'\) with k > 0, but has \(5, 6\)",
    ),
    "tokens": (
        dict(teacher_tokens=torch.zeros(5, 7, 2, dtype=torch.int64)), ValueError,
        r"teacher_tokens must have the shape of teacher_log_probs, \(5, 7, 6\), but has \(5, 7, 2\)",
    ),
    "tokens' type": (dict(teacher_tokens=torch.zeros(5, 7, K)), TypeError, "teacher_tokens must be int64"),
    "a token that is none": (dict(teacher_tokens=torch.full((5, 7, K), -1)), IndexError, "Target -1 is out of bounds"),
    "add_tail_bucket": (dict(add_tail_bucket=1), TypeError, "add_tail_bucket must be a bool, not 1"),
    "none": (
        dict(teacher_log_probs=torch.zeros(5, 7, 0), teacher_tokens=torch.zeros(5, 7, 0, dtype=torch.int64)), ValueError,
        r"with k > 0, but has \(5, 7, 0\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", [*WRONG, *OF_HEADS])
def test_wrong_arguments(what):
    changed, kind, message = (WRONG | OF_HEADS)[what]
    student, teacher, _ = make()
    with pytest.raises(kind, match=f"linear_distillation: {message}"):
        ckptkern.linear_distillation(**named(student, teacher) | changed)


@pytest.mark.parametrize("what", [*WRONG, *OF_K])
def test_wrong_arguments_of_top_k(what):
    changed, kind, message = (WRONG | OF_K)[what]
    student, teacher, _ = make()
    log_probs, tokens = top_k(teacher)
    given = dict(
        student_input=student["input"],
        student_weight=student["weight"],
        teacher_log_probs=log_probs,
        teacher_tokens=tokens,
    )
    with pytest.raises(kind, match=message):
        ckptkern.linear_topk_distillation(**given | changed)
