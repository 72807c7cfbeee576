"""mlp_block: [norm ->] MLP or gated MLP and what is around it, as one region."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..dispatch.checks import check_flags, check_input, check_options
from ..dispatch.choices import choose_impl, choose_mode, choose_workspace, compute_dtype, matmul_precision
from ..dispatch.shard import ACTIVE
from ..registration.across import across_ranks
from ..registration.functions import build
from ..registration.op import SublayerOp
from ..sublayer.lora import LoRA, gather_lora, update_dtype
from ..sublayer.residual import around, drawn
from .branch import LAYERS, check_branch, saves
from .sublayer import MLPOptions, MLPTensors, mlp_reference, mlp_sublayer, mlp_sublayer_backward


class MLPBlock(SublayerOp):
    name = "mlp_block"
    Tensors, Options = MLPTensors, MLPOptions
    compute = staticmethod(mlp_sublayer)
    gradients = staticmethod(mlp_sublayer_backward)
    in_torch_ops = staticmethod(mlp_reference)

    saves = staticmethod(saves)


_apply = build(MLPBlock)
across = across_ranks(_apply)


def gather(
    op,
    x,
    up_weight,
    up_bias,
    down_weight,
    down_bias,
    activation,
    dropout_p,
    *,
    gate_weight,
    gate_bias,
    lora,
    residual,
    training,
    recompute,
    workspace,
    **others,
) -> tuple[MLPTensors, MLPOptions]:
    """Checks all arguments of mlp_block; returns the sublayer's tensors, still without random states, and its options."""
    check_options(op, activation, recompute, dropout_p)
    check_flags(op, residual=residual, training=training)
    check_input(op, x)
    branch = dict(
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        up_weight=up_weight,
        up_bias=up_bias,
        down_weight=down_weight,
        down_bias=down_bias,
    )
    check_branch(op, x, branch)
    weights = {"gate": gate_weight, "up": up_weight, "down": down_weight}
    layers = {name: (name, weight) for name, weight in weights.items() if weight is not None}
    lora_tensors, lora_numbers = gather_lora(op, x, lora, layers, LAYERS)
    tensors, options = around(op, x, "down_weight", down_weight.shape[0], residual=residual, **others)
    dtype = compute_dtype(op, x, gate_weight, up_weight, down_weight)
    t = MLPTensors(**branch, **lora_tensors, **tensors)
    probe = x.new_empty(0, dtype=dtype)
    name, sizes = "mlp" if gate_weight is None else "gated_mlp", (x.shape[-1], up_weight.shape[0], down_weight.shape[0])
    impl = choose_impl(op, probe, *sizes, name=name)
    o = MLPOptions(
        gated=gate_weight is not None,
        activation=activation,
        dropout_p=float(dropout_p),
        first_column=0,
        recompute=choose_mode(recompute),
        backend=impl,
        precision=matmul_precision(probe),
        workspace=choose_workspace(op, workspace, probe, up_weight.numel()),
        lora=lora_numbers,
        lora_dtype=update_dtype(x, dtype, lora_tensors.values()),
        dtype=dtype,
        **options,
    )
    return t, o


def mlp_block(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    activation: str = "gelu",
    dropout_p: float = 0.0,
    *,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm_scale: Tensor | None = None,
    norm_shift: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_first: bool = True,
    post_norm: str | None = None,
    post_norm_weight: Tensor | None = None,
    post_norm_bias: Tensor | None = None,
    post_norm_eps: float = 1e-5,
    lora: Mapping[str, LoRA] | None = None,
    layer_scale: Tensor | float | None = None,
    resid_dropout_p: float = 0.0,
    drop_path_p: float = 0.0,
    residual: bool = True,
    training: bool = True,
    recompute: str = "full",
    workspace: int | str | None = None,
) -> Tensor:
    """An MLP with everything around it, as one region.

        h = norm(x) * (1 + norm_scale) + norm_shift
        f = down(dropout(act(up(h))))  or  down(dropout(act(gate(h)) * up(h)))
        z = drop_path(layer_scale * post_norm(dropout(f)))
        y = [x +] z                                           norm_first=False: y = norm([x +] z), h = x

    x [..., d], up_weight and gate_weight [n, d], down_weight [e, n], biases or None -> y [..., e].
    norm: None, "layer" or "rms", with norm_weight and norm_bias or None. norm_scale, norm_shift: [B, d] or [B, 1, ..., d], a
    vector for each sample (adaLN: DiT, SD3, Flux), of a norm before the branch, as in attention_block. post_norm as norm, of
    what the branch gives (Gemma 2, OLMo 2, Swin v2). layer_scale: a number (Granite), a vector [e] (layer scale: CaiT, DINOv2,
    ConvNeXt), or one for each sample, [B, e] or [B, 1, ..., e] (the gate of adaLN). Backward recomputes what the branch gives
    for a norm behind it and for trained vectors: by one matmul, at "full" by all. dropout_p of the hidden layer,
    resid_dropout_p of the branch, drop_path_p of whole samples of the branch (stochastic depth; x [B, ..., d] has B samples, x
    [tokens, d] is one): replayed from 16 bytes each. lora: as in attention_block, of the layers "gate", "up" and "down". The
    activation is a pass of its own. recompute, workspace: as in mlp and gated_mlp, with x the block's input: the norm is
    always recomputed. Raises ShapeError, DtypeError, DeviceError and LayoutError of ckptkern.errors, ValueError (choices),
    RuntimeError (backend).
    """
    arguments = dict(locals())
    if ACTIVE.shard is not None:
        return ACTIVE.shard.mlp_block(**arguments)
    t, o = gather("mlp_block", **arguments)
    return _apply(o, x, *drawn(t, o, x, training))
