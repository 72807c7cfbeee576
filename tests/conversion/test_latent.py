"""convert on multi-head latent attention: layers written in several ways, and modules that look alike and differ."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.architectures import HEADS, WIDTH, Gated, RMSNorm, fused_of, rotated
from torch import Tensor, nn
from torch.nn import functional as F

import ckptkern
from ckptkern.memory import saved_tensors
from ckptkern.parallel.roles import templates_of

NOPE, ROPE, V, RANK = 6, 4, 5, 7


def tables(S: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(S)[:, None] * torch.tensor([1.0, 0.1])
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """As DeepSeek's, in which each subclass changes one step."""

    def __init__(self, q_rank: int = 9):
        super().__init__()
        self.q_a, self.q_norm = (nn.Linear(WIDTH, q_rank), RMSNorm(q_rank)) if q_rank else (None, None)
        self.q = nn.Linear(q_rank or WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a, self.kv_norm = nn.Linear(WIDTH, RANK + ROPE), RMSNorm(RANK)
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + V), bias=False)
        self.out, self.scaling = nn.Linear(HEADS * V, WIDTH, bias=False), (NOPE + ROPE) ** -0.5

    def queries(self, x: Tensor) -> Tensor:
        q = self.q(x if self.q_a is None else self.q_norm(self.q_a(x)))
        return q.view(*x.shape[:2], HEADS, NOPE + ROPE).transpose(1, 2)

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c, shared = self.kv_a(x).split([RANK, ROPE], -1)
        return self.kv_norm(c), shared[:, None]

    def expanded(self, c: Tensor) -> tuple[Tensor, Tensor]:
        kv = self.kv_b(c).view(*c.shape[:2], HEADS, NOPE + V).transpose(1, 2)
        return kv.split([NOPE, V], -1)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin

    def keys(self, k: Tensor, shared: Tensor) -> Tensor:
        return torch.cat((k, shared.expand(-1, HEADS, -1, -1)), -1)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        unrotated, q = self.queries(x).split([NOPE, ROPE], -1)
        c, shared = self.latents(x)
        q, shared = self.rotate(q, shared, *tables)
        k, v = self.expanded(c)
        o = self.core(torch.cat((unrotated, q), -1), self.keys(k, shared), v)
        return self.out(o.transpose(1, 2).reshape(*x.shape[:2], HEADS * V))


class Written(Attention):
    """As DeepSeek's own code joins k."""

    def keys(self, k: Tensor, shared: Tensor) -> Tensor:
        made = k.new_empty(*k.shape[:3], NOPE + ROPE)
        made[:, :, :, :NOPE] = k
        made[:, :, :, NOPE:] = shared
        return made


class Copied(Attention):
    """As transformers does."""

    def keys(self, k: Tensor, shared: Tensor) -> Tensor:
        made = k.new_empty(*k.shape[:3], NOPE + ROPE)
        made[..., :NOPE].copy_(k)
        made[..., NOPE:].copy_(shared.expand(-1, HEADS, -1, -1))
        return made


class Interleaved(Attention):
    """Pairs of neighbours, as DeepSeek-V3's in transformers."""

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (table[:, None, :, : ROPE // 2] for table in (cos, sin))
        pairs = [(one[..., 0::2], one[..., 1::2]) for one in (q, k)]
        return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in pairs)


class Complex(Attention):
    """Pairs as complex numbers, as DeepSeek-V2's."""

    def rotate(self, q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (torch.view_as_complex(one.unflatten(-1, (-1, 2)).contiguous()) * turns[:, None] for one in (q, k))
        return tuple(torch.view_as_real(one).flatten(3) for one in (q, k))

    def forward(self, x: Tensor, tables: Tensor) -> Tensor:
        return super().forward(x, (tables,))


class Unnormed(Attention):
    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c, shared = self.kv_a(x).split([RANK, ROPE], -1)
        return c, shared[:, None]


class Unrotated(Attention):
    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q, k


class WrittenOut(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) * self.scaling).masked_fill(later, -torch.inf)
        return F.dropout(scores.softmax(-1), 0.0, self.training) @ v


class Yarn(Attention):
    """With a scale that is not that of its head dim."""

    def __init__(self):
        super().__init__()
        self.scaling *= 1.37**2


READ = {
    "cat": Attention, "one latent": lambda: Attention(0), "setitem": Written, "copy": Copied, "interleaved": Interleaved,
    "complex": Complex, "no norm": Unnormed, "no rotation": Unrotated, "a scale": Yarn,
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attention, self.mlp = attention, Gated()

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), tables)
        return x + self.mlp(self.norm2(x))


def given(attention: nn.Module, S: int = 8) -> tuple[Tensor, tuple | Tensor]:
    cos, sin = tables(S)
    is_complex = isinstance(attention, Complex)
    return torch.randn(2, S, WIDTH), torch.complex(cos, sin)[..., : ROPE // 2] if is_complex else (cos, sin)


def step(module: nn.Module, x: Tensor, tables: tuple | Tensor) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    y = module(x, tables)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy, allow_unused=True)]


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("whole", [False, True], ids=["alone", "layer"])
def test_what_is_read_is_right_and_saves_less(name: str, whole: bool) -> None:
    torch.manual_seed(0)
    attention = READ[name]()
    ours = Layer(attention) if whole else attention
    theirs = copy.deepcopy(ours)
    conversion = ckptkern.convert(ours, *given(attention), recompute="full")
    assert fused_of(conversion) == ["transformer_layer" if whole else "latent_attention_block"], conversion
    for S in (8, 11):
        x, rotary = given(attention, S)
        torch.testing.assert_close(step(ours, x, rotary), step(theirs, x, rotary), rtol=1e-4, atol=1e-5)
    saved = []
    for module in (ours, theirs):
        with saved_tensors([*module.parameters(), *(rotary if isinstance(rotary, tuple) else (rotary,))]) as found:
            module(x.requires_grad_(), rotary)
        saved.append(found.bytes)
    assert saved[0] < saved[1] / 3


def test_a_core_that_is_written_out_with_a_mask_of_its_own_is_left() -> None:
    """Its mask is no argument; as in attention of other kinds."""
    attention = WrittenOut()
    assert not ckptkern.convert(attention, *given(attention)).converted


class RotatedFirst(Attention):
    """Rotates the first dimensions of q, not those that meet the rotated part of k."""

    def queries(self, x: Tensor) -> Tensor:
        return super().queries(x).roll(ROPE, -1)


class RotatedLatent(Attention):
    """The part of k that is rotated comes first of what is projected."""

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared, c = self.kv_a(x).split([ROPE, RANK], -1)
        return self.kv_norm(c), shared[:, None]


class ValuesFirst(Attention):
    def expanded(self, c: Tensor) -> tuple[Tensor, Tensor]:
        kv = self.kv_b(c).view(*c.shape[:2], HEADS, NOPE + V).transpose(1, 2)
        v, k = kv.split([V, NOPE], -1)
        return k, v


class NormOfAll(Attention):
    """The norm of the latent and of the part of k that is rotated, as one."""

    def __init__(self):
        super().__init__()
        self.kv_norm = RMSNorm(RANK + ROPE)

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c, shared = self.kv_norm(self.kv_a(x)).split([RANK, ROPE], -1)
        return c, shared[:, None]


class LayerNormed(Attention):
    def __init__(self):
        super().__init__()
        self.kv_norm = nn.LayerNorm(RANK)


class TwoEpsilons(Attention):
    def __init__(self):
        super().__init__()
        self.kv_norm = RMSNorm(RANK, 1e-3)


class QueriesAlone(Attention):
    """Rotates q and not k."""

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotate(q, k, cos, sin)[0], k


class HalfOfK(Attention):
    """A scale of one part of k."""

    def keys(self, k: Tensor, shared: Tensor) -> Tensor:
        return super().keys(k, shared * 0.5)


class Halved(Copied):
    """The same, in place, through a view of k."""

    def keys(self, k: Tensor, shared: Tensor) -> Tensor:
        made = super().keys(k, shared)
        made[..., NOPE:].mul_(0.5)
        return made


class ClampedPart(Copied):
    """Beyond the example's numbers, in place, through a view of k."""

    def keys(self, k: Tensor, shared: Tensor) -> Tensor:
        made = super().keys(k, shared)
        made[..., NOPE:].clamp_(-50, 50)
        return made


class ClampedLatent(Attention):
    """Beyond the example's numbers."""

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c, shared = self.kv_a(x).split([RANK, ROPE], -1)
        return self.kv_norm(c.clamp(-50, 50)), shared[:, None]


class ScaledLatent(Attention):
    """As LongCat's."""

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c, shared = super().latents(x)
        return c * 2.0, shared


class DroppedLatent(Attention):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c, shared = super().latents(x)
        return self.dropout(c), shared


class ByLength(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling * q.shape[2] / 8)


class OtherInput(Attention):
    """The latent is not of what q reads."""

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().latents(x.roll(1, 1))


class NormedHeads(Attention):
    """A norm of q behind its projection."""

    def __init__(self):
        super().__init__()
        self.head_norm = RMSNorm(NOPE + ROPE)

    def queries(self, x: Tensor) -> Tensor:
        return self.head_norm(super().queries(x))


class Swapped(Attention):
    """Two heads of k and v change places."""

    def expanded(self, c: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(one.flip(1) for one in super().expanded(c))


NEAR_MISSES = (
    RotatedFirst, ClampedPart, RotatedLatent, ValuesFirst, NormOfAll, LayerNormed, TwoEpsilons, QueriesAlone, HalfOfK, Halved,
    ClampedLatent, ScaledLatent, DroppedLatent, ByLength, OtherInput, NormedHeads, Swapped,
)  # fmt: skip


@pytest.mark.parametrize("kind", NEAR_MISSES)
def test_a_near_miss_is_left(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    ours = kind()
    theirs, (x, rotary) = copy.deepcopy(ours), given(ours)
    conversion = ckptkern.convert(ours, x, rotary)
    assert "latent_attention_block" not in fused_of(conversion), conversion
    x, rotary = given(ours, 11)
    for module in (ours, theirs):
        torch.manual_seed(1)
        with torch.no_grad():
            module.kv_a.weight.mul_(100)
    torch.manual_seed(1)
    mine = step(ours, x, rotary)
    torch.manual_seed(1)
    torch.testing.assert_close(mine, step(theirs, x, rotary), rtol=1e-4, atol=1e-4)


def test_low_rank_updates_of_a_latents_projections_are_left() -> None:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"attention": Attention()})
    model.forward = lambda x, tables: model["attention"](x, tables)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["kv_b"], init_lora_weights=False))
    attention = adapted.base_model.model["attention"]
    conversion = ckptkern.convert(attention, *given(attention))
    assert "latent_attention_block" not in fused_of(conversion)


def test_it_has_no_sharded_form() -> None:
    for module in (Attention(), Layer(Attention())):
        ckptkern.convert(module, *given(module))
        with pytest.raises(TypeError, match="has latent attention, which has no sharded form"):
            templates_of(module)


def test_the_scale_is_read_in_each_module() -> None:
    """A module whose scale was changed later is not what was checked."""
    attention = Yarn()
    x, rotary = given(attention)
    ckptkern.convert(attention, x, rotary)
    other = copy.deepcopy(attention)
    other.scaling = 0.2
    original = Attention()
    original.load_state_dict(other.state_dict())
    original.scaling = 0.2
    torch.testing.assert_close(step(other, x, rotary), step(original, x, rotary), rtol=1e-4, atol=1e-5)
