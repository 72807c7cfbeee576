"""Logits of a converted head: what they are for who reads them, and when they cannot be made any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conversion.test_heads import WIDTH, B, Doubled, S, V, assert_same_step, converted, ids, model_of
from torch import Tensor
from torch.nn import functional as F

from ckptkern.conversion.logits import Logits, Matmul, Tokens


def test_logits_are_the_linear_layers() -> None:
    model = converted(model_of(bias=True))
    logits, _ = model(ids(), ids(1))
    assert isinstance(logits, Logits)
    assert (logits.shape, logits.size(-1), logits.dim(), len(logits)) == ((B, S, V), V, 3, B)
    assert (logits.dtype, logits.device, logits.requires_grad) == (torch.float32, torch.device("cpu"), True)
    assert logits.grad_fn is not None
    want = F.linear(model.hidden(ids()), model.head.weight, model.head.bias)
    assert torch.equal(logits, want)
    assert torch.equal(logits[..., 1:, :].detach(), want[:, 1:])
    assert logits.tolist() == want.tolist()
    assert str(logits.detach()) == str(want.detach())


def test_without_a_loss_they_are_logits_of_any_use() -> None:
    theirs = model_of()
    ours = converted(theirs)
    for use in (
        lambda z: z.softmax(-1).square().sum(),
        lambda z: Doubled.apply(z).sin().sum(),
        lambda z: torch.autograd.grad(z.tanh().sum(), z)[0].sum() + z.mean(),
        lambda z: torch.stack(list(z)).exp().mean(),
        lambda z: F.cross_entropy(z.transpose(1, 2), ids(1)),
    ):
        (mine,), (want,) = (torch.autograd.grad(use(model(ids())[0]), [model.embed.weight]) for model in (ours, theirs))
        torch.testing.assert_close(mine, want)
    for mode in (True, False):
        with torch.no_grad():
            logits, _ = ours.train(mode)(ids(), ids(1))
        assert type(logits) is Tensor
        assert torch.equal(logits, theirs(ids())[0])
    with torch.inference_mode():
        assert type(ours(ids())[0]) is Tensor


def loss_of(z: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), ids(1).flatten())


def hooked(z: Tensor) -> Tensor:
    z.register_hook(lambda dy: 3 * dy)
    return loss_of(z)


def retained(z: Tensor) -> Tensor:
    z.retain_grad()
    loss_of(z).backward(retain_graph=True)
    return loss_of(z) + (z.grad.sin() * z).sum()


def hooked_node(z: Tensor) -> Tensor:
    z.register_hook(lambda dy: 3 * dy)
    return Doubled.apply(z).sin().sum()


def divided_node(z: Tensor) -> Tensor:
    z.div_(4)
    return Doubled.apply(z).sin().sum()


def masked_node(z: Tensor) -> Tensor:
    z[..., 0] = 0
    return Doubled.apply(z).sin().sum()


def masked_data(z: Tensor) -> Tensor:
    z.data[..., 5] = -1e4
    return loss_of(z)


def replaced_data(z: Tensor) -> Tensor:
    z.data = z.detach() / 2
    return loss_of(z)


def masked_array(z: Tensor) -> Tensor:
    z.detach().numpy()[..., 5] = -1e4
    return loss_of(z)


def copied_before(z: Tensor) -> Tensor:
    half = z.float() * 0.5
    with torch.no_grad():
        z.detach()[..., 5] = -1e4
    return loss_of(half) + loss_of(z)


def changed_after(z: Tensor) -> Tensor:
    half = z.float() * 0.5
    z.exp_()
    return loss_of(half) + loss_of(z)


def detached(z: Tensor) -> Tensor:
    before = z.exp().sum()
    z.detach_()
    return loss_of(z) + before


def gradient_of(z: Tensor) -> Tensor:
    (dz,) = torch.autograd.grad(z.softmax(-1).square().sum(), z, create_graph=True)
    return (dz * z).sum() + loss_of(z)


@pytest.mark.parametrize(
    "use",
    [
        hooked, retained, hooked_node, divided_node, masked_node, masked_data, replaced_data, masked_array, copied_before,
        changed_after, detached, gradient_of,
    ],
)  # fmt: skip
def test_hooks_and_changes_of_logits_count(use: Callable[[Tensor], Tensor]) -> None:
    theirs = model_of()
    ours = converted(theirs)
    ours.loss = theirs.loss = lambda model, logits, targets: use(logits)
    assert_same_step(ours, theirs)


def test_gradients_that_are_never_formed_are_refused() -> None:
    logits, loss = converted(model_of())(ids(), ids(1))
    logits.register_hook(print)  # as fully_shard does with all outputs
    assert not logits.made
    with pytest.raises(RuntimeError, match="retain_grad needs the gradient of logits"):
        logits.retain_grad()
    with pytest.raises(RuntimeError, match="grad needs the gradient of logits"):
        torch.autograd.grad(loss, logits, allow_unused=True)
    torch.autograd.grad(logits.sum(), logits.matmul.weight)


def test_a_copy_tells_its_own_layout() -> None:
    w = torch.randn(V, WIDTH)
    want = F.linear(torch.randn(B, S, WIDTH), w)
    logits = Matmul(torch.randn(B, S, WIDTH), w, None).logits()
    for change in (lambda z: z.transpose(1, 2).contiguous(), lambda z: z.transpose(0, 1) * 2, lambda z: z[:, 1:]):
        ours, theirs = change(logits), change(want)
        assert (ours.stride(), ours.is_contiguous()) == (theirs.stride(), theirs.is_contiguous())
        assert ours.storage_offset() == theirs.storage_offset()


@pytest.mark.parametrize("when", ["an optimizer's step", "freed", "replaced"])
def test_logits_that_come_too_late_are_an_error(when: str) -> None:
    model = converted(model_of())
    logits, loss = model(ids(), ids(1))
    if when == "freed":
        model.head.weight.data.untyped_storage().resize_(0)
    elif when == "replaced":
        model.head.weight.data = 2 * model.head.weight.data
    else:
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="Read logits before the optimizer's step"):
        logits.argmax(-1)
    with pytest.raises(RuntimeError, match="Read logits before"):
        F.cross_entropy(logits.transpose(1, 2), ids(1))


def test_a_wrong_target_is_torchs_error() -> None:
    model = converted(model_of())
    with pytest.raises(IndexError, match="out of bounds"):
        model(ids(), ids(1) + V)
    with pytest.raises(ValueError, match="Expected input batch_size"):
        model(ids(), ids(1)[:, 1:])


def test_metadata_asks_for_no_values() -> None:
    x, w = torch.randn(4, WIDTH), torch.randn(V, WIDTH)
    logits = Matmul(x, w, None).logits()
    hash(logits), logits.numel(), logits.stride(), logits.is_contiguous(), logits.element_size(), logits.layout
    assert logits.view(2, 2, V)[1].shape == (2, V)
    assert not logits.made
    assert not logits.requires_grad


def test_a_view_that_cuts_tokens_apart_is_none() -> None:
    whole = Matmul(torch.randn(4, WIDTH), torch.randn(V, WIDTH), None).logits().tokens
    assert whole.others() == [0]
    for shape, strides, first in (
        ((3, V), (1, 1), 0),
        ((3, V), (V, 1), 1),
        ((3, V), (V - 1, 1), 0),
        ((3, V - 1), (V, 1), 0),
    ):
        cut = Tokens(whole.rows, V, whole.placeholder.as_strided(shape, strides, first))
        assert cut.others() is None
