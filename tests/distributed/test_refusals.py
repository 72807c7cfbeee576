"""What TensorParallel, ContextParallel and context_parallel refuse, and with which words."""

import functools

import pytest
import torch
from support.architectures import ARCHITECTURES, adapted, ids
from support.ranks import on_ranks
from support.strategies import HEADS, WIDTH, B, P, S, converted, llama, split
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import ckptkern
from ckptkern.errors import ShapeError
from ckptkern.parallel import ContextParallel, TensorParallel, context_parallel, shard_sequence


def second_order(call, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    dx.sum().backward()


def double(module, args, y):
    return 2 * y


@on_ranks(mesh="ranks")
def test_styles(mesh):
    attention, mlp, rank = ckptkern.nn.LlamaAttention, ckptkern.nn.MLP, mesh.get_local_rank()
    heads, rows, context = TensorParallel(), TensorParallel(sequence_parallel=True), ContextParallel()
    x, memory = torch.randn(2, B, S, WIDTH)
    activated, lora = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), adapted(ARCHITECTURES["llama"].model())
    ckptkern.convert(activated, torch.randn(2, 4, 8))
    ckptkern.convert(lora, ids())
    tensor, sequence = split(mlp(8, 128, dropout=P), mesh, "heads"), split(llama(), mesh, "contiguous")
    cross, hooked = split(ckptkern.nn.MultiheadAttention(WIDTH, HEADS), mesh, "rows"), split(llama(), mesh, "rows")
    hooked.mlp.register_forward_hook(double)

    def sampled(x: Tensor) -> Tensor:
        torch.manual_seed(rank)
        return tensor(x)

    divides = "which must be a multiple of the mesh's size, 2"
    for style, module, error, match, *names in (
        (heads, attention(WIDTH, 3, head_dim=4), ValueError, f"num_heads=3, {divides}"),
        (heads, attention(WIDTH, HEADS, 1), ValueError, f"num_kv_heads=1, {divides}"),
        (heads, mlp(8, 31), ValueError, r"fc1.weight has shape \(31, 8\), whose dimension 0 must be a multiple"),
        (heads, nn.Linear(8, 8), TypeError, "Linear is not a fused block; name blocks of ckptkern.nn"),
        (heads, activated, TypeError, "Sequential is a linear_act, which has no heads or hidden units"),
        (heads, lora, ValueError, r"Llama has low-rank updates \(LoRA\), which cannot be split", "layers.*"),
        (heads, converted("sandwich"), ValueError, "norm over all heads at once", "layers.*"),
        (heads, tensor, ValueError, "this MLP is split already"),
        (
            rows,
            converted("decoder"),
            ValueError,
            "has cross-attention, which sequence_parallel does not support",
            "layers.*",
        ),
        (context, mlp(8, 8), TypeError, "MLP is a mlp_block, which has no attention"),
        (context, sequence, ValueError, "are split already"),
    ):
        with pytest.raises(error, match=match):
            parallelize_module(module, mesh, {names[0]: style} if names else style)
    layers = nn.TransformerEncoderLayer(WIDTH, 4, 40, 0.0, batch_first=True)
    ckptkern.convert(layers, x)
    parallelize_module(layers, mesh, context)
    shapes = r"equal parts of a sequence, but their inputs have the shapes \(2, 4, 32\), \(2, 6, 32\)"
    one_split, narrow = "already sharded by TensorParallel: convert first", x[0, :, :8]
    for error, match, function in (
        (TypeError, "sequence_parallel must be a bool, not 'yes'", lambda: TensorParallel(sequence_parallel="yes")),
        (ValueError, "order", lambda: ContextParallel(order="ring")),
        (ValueError, "takes a multiple of 4 rows, not 6", lambda: shard_sequence(x[0, :6], mesh, 0, order="zigzag")),
        (
            ValueError,
            "mesh must have one dimension, such as mesh\\['tp'\\], but has 2",
            lambda: heads._apply(mlp(8, 32), init_device_mesh("cpu", (1, 2))),
        ),
        (ValueError, one_split, lambda: ckptkern.convert(tensor, narrow)),
        (ValueError, one_split, lambda: ckptkern.revert(tensor)),
        (ValueError, "already sharded by ContextParallel", lambda: ckptkern.revert(layers)),
        (
            ValueError,
            "sequence_parallel does not go with cross-attention",
            lambda: cross(x, memory, memory, need_weights=False),
        ),
        (
            RuntimeError,
            "calls its submodules, which sequence_parallel does not support",
            lambda: hooked(x[:, : S // 2]),
        ),
        (RuntimeError, "must draw the same dropout masks, but their random states differ", lambda: sampled(narrow)),
        (ValueError, shapes, lambda: sequence(torch.randn(2, 4 + 2 * rank, WIDTH))),
        (
            NotImplementedError,
            "second-order gradients are not supported",
            lambda: second_order(split(mlp(8, 32), mesh, "heads"), narrow),
        ),
    ):
        with pytest.raises(error, match=match):
            function()


@on_ranks(mesh="ranks")
def test_calls_in_context_parallel(mesh):
    x, odd, weight = torch.randn(B, 8, WIDTH), torch.randn(7, WIDTH), torch.eye(WIDTH)
    cu, q, narrow = torch.tensor([0, 14], dtype=torch.int32), torch.randn(1, 2, 8, 4), torch.eye(24)
    attention = ckptkern.nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def attend(x: Tensor = x, weight: Tensor = weight, heads: int = 4, **options) -> Tensor:
        return ckptkern.attention_block(x, [weight] * 3, None, weight, None, heads, **options)

    packed = functools.partial(attend, odd, cu_seqlens=cu)
    alone = RuntimeError, "this rank's rows alone"
    for error, match, function, *how in (
        (ValueError, "key_value does not go with a sequence on several ranks", lambda: attend(key_value=x)),
        (ShapeError, "an even number of rows", lambda: attend(odd[None]), "zigzag"),
        (
            ValueError,
            "no gradient of attn_mask is formed",
            lambda: attend(attn_mask=torch.zeros(16, 16, requires_grad=True)),
        ),
        (ValueError, r"dropout_p with cu_seqlens .* exchange='heads'", lambda: packed(dropout_p=0.1)),
        (ValueError, "max_seqlen=13 must not be below the longest sequence", lambda: packed(max_seqlen=13)),
        (ValueError, "a window that sees later rows", lambda: packed(window_size=(3, 3))),
        (
            ShapeError,
            r"attn_mask of shape \(8, 8\) does not broadcast to \(3, 4, 16, 16\)",
            lambda: attend(attn_mask=torch.zeros(8, 8)),
        ),
        (
            ValueError,
            "needs num_kv_heads that the 2 ranks divide, not 3",
            lambda: attend(x[..., :24], narrow, 3),
            "contiguous",
            "heads",
        ),
        (*alone, lambda: ckptkern.scaled_dot_product_attention(q, q, q)),
        (*alone, lambda: ckptkern.varlen_attn(q[0], q[0], q[0], cu, cu, 8, 8)),
        (*alone, lambda: attention(x, x, x, need_weights=True)),
        (
            NotImplementedError,
            "second-order gradients are not supported over a context-parallel group",
            lambda: second_order(attend, x),
        ),
    ):
        context = context_parallel(mesh, **dict(zip(("order", "exchange"), how, strict=False)))
        with context, pytest.raises(error, match=match):
            function()
