"""linear_distillation and linear_topk_distillation where classes, candidates or tokens do not count, where two models are alike
or differ in all, and with a teacher of another dtype."""

import math

import pytest
import torch
import torch.nn.functional as F
from support import catalog, oracles
from support.cases import (
    SAMPLES,
    assert_as_exact,
    assert_same,
    assert_same_within_rounding,
    each_backend,
    gradients,
)

import ckptkern
from ckptkern.eager import distillation

LEAD, CLASSES, K = (5, 7), 300, 6
each_beta = pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])


def make(dtype=torch.float32, features=33):
    """(the student's tensors, the teacher's)"""
    arguments = catalog.OPS["linear_distillation"].inputs(catalog.Sizes(LEAD, features, 32, CLASSES))
    teacher = {name: tensor.to(dtype) for name, tensor in arguments.items() if name.startswith("teacher")}
    return catalog.random_leaves(arguments, dtype), teacher


def fused(teacher, **options):
    return lambda student: ckptkern.linear_distillation(**student, **teacher, **options)


@each_beta
def test_classes_that_a_bias_rules_out(beta):
    """Of both models, or of one whose divergence from the other is finite; no NaN, and no gradient for them."""
    student, teacher = make()
    with torch.no_grad():
        student["student_bias"][100:] = -torch.inf
        teacher["teacher_bias"][90 if beta < 1 else 110 :] = -torch.inf
        if 0 < beta < 1:
            student["student_bias"][:50] = -torch.inf
    actual = gradients(fused(teacher, beta=beta, reduction="none"), student)
    assert all(tensor.isfinite().all() for tensor in actual.values())
    assert (actual["student_weight"][110:] == 0).all()
    assert actual["y"].min() > 0


@pytest.mark.parametrize("beta", [0.5, 0.1, 1e-30])
def test_models_that_agree_on_nothing(beta):
    """The bound of the Jensen-Shannon divergence, reached though logits differ by thousands."""
    x, weight = torch.eye(2)[:1].requires_grad_(), torch.tensor([[5000.0, 0.0], [0.0, 5000.0]])
    loss = ckptkern.linear_distillation(x, weight, x.detach().flip(-1), weight, beta=beta)
    torch.testing.assert_close(loss.item(), -beta * math.log(beta) - (1 - beta) * math.log(1 - beta))
    (grad,) = torch.autograd.grad(loss, x)
    assert grad.abs().max() < 1e-6


@each_beta
def test_a_student_equal_to_its_teacher(beta):
    """No loss and no gradient, also of a head that both share, which is trained as the student's alone."""
    model = [tensor for name, tensor in make()[0].items() if "bias" not in name]
    loss = ckptkern.linear_distillation(*model, *model, beta=beta)
    assert abs(loss.item()) < 1e-6
    assert all(grad.abs().max() < 1e-6 for grad in torch.autograd.grad(loss, model))


def test_a_teacher_of_another_dtype_and_autocast():
    student, teacher = make()
    half = {name: tensor.bfloat16().requires_grad_() for name, tensor in teacher.items()}
    exact = {name: tensor.detach().float() for name, tensor in half.items()}
    assert_same_within_rounding(gradients(fused(half), student), gradients(fused(exact), student))
    assert all(tensor.grad is None for tensor in half.values())
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused(teacher)(student)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, fused(half)({name: tensor.bfloat16() for name, tensor in student.items()}))


def test_a_teachers_frozen_quantised_head():
    student, teacher = make(features=32)
    raw = torch.randint(0, 256, (CLASSES, 1, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    head = ckptkern.Frozen(raw, torch.full((CLASSES, 1), 124, dtype=torch.uint8), kind="mxfp4", dtype=torch.float32)
    heads = (teacher | {"teacher_weight": weight} for weight in (head, head.dequantize()))
    assert_same_within_rounding(*(gradients(fused(head, beta=0.3), student) for head in heads))


def test_there_is_no_kernel():
    student, teacher = make()
    asked = r"linear_distillation: backend\('triton'\) was asked for, but the op has no kernel"
    with ckptkern.backend("triton"), pytest.raises(RuntimeError, match=asked):
        fused(teacher)(student)


# -- beside PyTorch's own error

CERTAIN = {"sure student": (True, False), "sure teacher": (False, True), "alike": (True, True), "opposed": (True, True)}
PAIRS = ("near", "far", *CERTAIN)


def pair_of(kind, std, seed, tokens=16, features=32):
    """The student's and the teacher's tensors, in float64: logits of standard deviation `std`, or of a model that is sure of a
    class, all but some 1e-7, of that size."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows, scale=1.0):
        return scale * torch.randn(rows, features, generator=generator, dtype=torch.float64)

    def model(sure, first):
        x = normal(tokens)
        if not sure:
            return x, normal(CLASSES, std / features**0.5)
        weight = normal(1, std / features**0.5) + normal(CLASSES, features**-0.5)
        weight[first : first + tokens] += 22 * x / x.square().sum(1, keepdim=True)
        return x, weight

    sure_student, sure_teacher = CERTAIN.get(kind, (False, False))
    student = model(sure_student, 0)
    x, weight = model(sure_teacher, 0 if kind == "alike" else tokens)
    teacher = (student[0] + 0.1 * x, student[1]) if kind == "near" else (x, weight)
    return dict(zip(("student_input", "student_weight"), student, strict=True)), teacher


def check_beside_pytorch(ours, unfused, kind, std, targets_of, dtype=torch.float32, **options):
    """Asserts that over twelve samples errors of losses and gradients are at most twice that of the formula in PyTorch; the
    exact results are those in float64. given: keyword arguments of the teacher's tensors."""

    def stacked(function, wide):
        rows = []
        for seed in range(SAMPLES):
            student, teacher = pair_of(kind, std, seed)
            student = {name: t.to(dtype).to(wide).requires_grad_() for name, t in student.items()}
            arguments = targets_of(*(t.to(dtype).to(wide) for t in teacher)) | options
            rows.append(gradients(lambda s, more=arguments: function(**s, **more, reduction="none"), student))
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    assert_as_exact(stacked(ours, dtype), stacked(unfused, dtype), stacked(unfused, torch.float64))


def as_given(x, weight):
    return dict(teacher_input=x, teacher_weight=weight)


def check_distillation(kind, std, **more):
    check_beside_pytorch(ckptkern.linear_distillation, oracles.linear_distillation, kind, std, as_given, **more)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("kind", PAIRS)
def test_large_logits_are_as_exact_as_pytorchs(kind, beta):
    for std in (1, 8, 24, 60):
        check_distillation(kind, std, beta=beta)


@each_beta
@pytest.mark.parametrize(
    "more",
    [
        dict(temperature=3.0),
        dict(temperature=0.3),
        dict(softcap=30.0, teacher_softcap=50.0),
        dict(dtype=torch.bfloat16),
        dict(dtype=torch.float16),
    ],
    ids=str,
)
def test_large_logits_with_options_and_in_16_bits(more, beta):
    for kind in ("far", "sure student"):
        check_distillation(kind, 24, beta=beta, **more)


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_logits_that_backward_rounds_otherwise(monkeypatch, beta):
    """As a library may, in matmuls of a part of the vocabulary: they add in another order here."""
    in_order = distillation.head_logits

    def logits(x, w, *more):
        return in_order(x, w, *more) if len(w) == CLASSES else in_order(x.flip(1), w.flip(1), *more)

    monkeypatch.setattr(distillation, "head_logits", logits)
    for kind in ("sure student", "opposed"):
        check_distillation(kind, 24, beta=beta, workspace=1)


# -- the k largest log-probabilities


def top_k(teacher, k=K):
    z = F.linear(*(teacher[f"teacher_{name}"].double() for name in ("input", "weight", "bias")))
    return dict(zip(("teacher_log_probs", "teacher_tokens"), z.log_softmax(-1).topk(k), strict=True))


def of_k(targets, **options):
    return lambda student: ckptkern.linear_topk_distillation(**student, **targets, **options)


each_tail = pytest.mark.parametrize("tail", [True, False])


@each_tail
def test_all_classes_are_the_whole_divergence_and_a_tail_bucket_is_at_most_it(tail):
    student, teacher = make(torch.float64)
    whole = fused(teacher, reduction="none")(student)
    every = of_k(top_k(teacher, CLASSES), add_tail_bucket=tail, reduction="none")(student)
    torch.testing.assert_close(every, whole)
    if tail:
        assert (of_k(top_k(teacher), reduction="none")(student) <= whole).all()


@each_beta
@each_backend
def test_k_log_probabilities_are_as_exact_as_pytorchs(backend, beta):
    def k_of(x, weight):
        top_k = (x.double() @ weight.double().T).log_softmax(-1).topk(K)
        return dict(teacher_log_probs=top_k.values.to(x.dtype), teacher_tokens=top_k.indices)

    both = ckptkern.linear_topk_distillation, oracles.linear_topk_distillation
    with ckptkern.backend(backend):
        for kind, std, tail in (("sure student", 24, False), ("far", 4, True))[: 1 if backend == "triton" else 2]:
            check_beside_pytorch(*both, kind, std, k_of, beta=beta, add_tail_bucket=tail)


@each_tail
@each_beta
@each_backend
def test_padding_is_no_candidate(backend, beta, tail):
    """Of every other token the last two of k, as TRL's collator writes it, or labels of -100 with any number beside them. A
    token without candidates has no loss and no gradient, whatever its hidden state."""
    student, teacher = make()
    all_, fewer = top_k(teacher), top_k(teacher, K - 2)
    padded, labels = ({name: t.clone() for name, t in all_.items()} for _ in range(2))
    padded["teacher_log_probs"][::2, :, -2:], padded["teacher_tokens"][::2, :, -2:] = -torch.inf, -1
    padded["teacher_log_probs"][2] = -torch.inf
    labels["teacher_tokens"][::2, :, -2:] = labels["teacher_tokens"][2] = -100
    options = dict(beta=beta, add_tail_bucket=tail, reduction="none")
    with ckptkern.backend(backend):
        actual, same, unpadded, short = (
            gradients(of_k(targets, **options), student, torch.ones(LEAD)) for targets in (padded, labels, all_, fewer)
        )
    assert_same(same, actual)
    for name in ("y", "student_input"):
        assert (actual[name][2] == 0).all(), name
        torch.testing.assert_close(actual[name][1::2], unpadded[name][1::2])
        torch.testing.assert_close(actual[name][::4], short[name][::4])
    assert (actual["y"][[0, 1, 3, 4]] > 0).all()
