"""One layer of each family at its published width, counted: `make bench-layers`. Nothing is computed, and nothing is measured.

A layer is converted on a few tokens on the CPU, and then called on meta tensors, in bfloat16. saved_bytes: what forward saves
for backward, the layer's input with it. peak_bytes: of forward and backward (`ckptkern.conversion.recorder`). Both without
parameters, their gradients, and what all layers of the model share: rotary tables, masks, T5's bias. seconds: a roofline of an
H200 (`ckptkern.planning.timing`); each op of PyTorch is a kernel there, and so is each op of ckptkern in a pass.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ckptkern
from ckptkern.conversion.recorder import step_of
from ckptkern.conversion.trace import leaves_of, mapped
from ckptkern.extras import missing
from ckptkern.memory import saved_tensors
from ckptkern.planning.timing import RATES, estimated
from ckptkern.tools.estimate.variants import fused_attention

from .shapes import FAMILIES, Build

MIB = 2**20
GPU = RATES["h200"]
WORKSPACE = GPU.memory // 32  # the default of such a GPU
META = torch.device("meta")
COLUMNS = ("layer", "tokens", "variant", "replaced_by", "saved_bytes", "peak_bytes", "seconds")
VARIANTS = ("eager", "checkpoint", "selective", "full")
BEGIN, END = "<!-- make bench-layers -->", "<!-- end -->"


class Call(NamedTuple):
    """A call of a layer on meta tensors. x: the input, the first of its floating point tensors; shared: the other tensors."""

    args: tuple
    kwargs: dict[str, Any]

    @property
    def x(self) -> Tensor:
        return next(t for t in self.tensors if t.is_floating_point())

    @property
    def tensors(self) -> list[Tensor]:
        return [one for one in leaves_of((self.args, self.kwargs)) if isinstance(one, Tensor)]

    @property
    def shared(self) -> list[Tensor]:
        x = self.x
        return [t for t in self.tensors if t is not x]


class Reached(Exception):
    """The layer was called."""


def on_meta(layer: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to(META), p.requires_grad) for p in layer.parameters()}
    memo |= {id(b): b.detach().to(META) for b in layer.buffers()}
    return copy.deepcopy(layer, memo)


def captured(model: nn.Module, layer: nn.Module, inputs: dict[str, Any]) -> Call:
    """The call that the model makes of the layer, with its tensors on the meta device."""
    calls: list[Call] = []

    def note(_, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.append(Call(*mapped(lambda t: t.detach().to(META).requires_grad_(t.requires_grad), (args, kwargs))))
        raise Reached

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        model(**inputs)
    except Reached:
        pass
    finally:
        handle.remove()
    return calls[0]


class _Upstream(torch.autograd.Function):
    """A loss whose gradient is a tensor of its own, as the layer above returns one."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        ctx.like = y.shape, y.dtype
        return y.new_empty(())

    @staticmethod
    def backward(ctx, dloss: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device=META)


class Training(nn.Module):
    """A layer and the loss of what it returns."""

    def __init__(self, layer: nn.Module, recomputes: bool):
        super().__init__()
        self.layer, self.recomputes = layer, recomputes

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.recomputes:
            y = checkpoint(self.layer, *args, use_reentrant=False, **kwargs)
        else:
            y = self.layer(*args, **kwargs)
        return _Upstream.apply(y if isinstance(y, Tensor) else y[0])


def counted(layer: nn.Module, call: Call, recomputes: bool = False) -> dict[str, Any]:
    """saved_bytes, peak_bytes and seconds of a training step of the layer, which is on the meta device."""
    training = Training(layer, recomputes).train()

    def step() -> None:
        training.zero_grad(set_to_none=True)
        training(*call.args, **call.kwargs).backward()

    with fused_attention(), ckptkern.workspace(WORKSPACE):
        with saved_tensors([*layer.parameters(), *layer.buffers(), *call.shared]) as saved:
            training(*call.args, **call.kwargs)
        peak = step_of(training, *call, there=training.parameters()).peak
        seconds = estimated(step, GPU)
    return {"saved_bytes": saved.bytes, "peak_bytes": peak + call.x.nbytes, "seconds": f"{seconds:.4e}"}


def replaced_by(conversion: ckptkern.Conversion, layer: str, copied: nn.Module) -> str:
    """What the layer became, and the ops inside it; after a call of the copied layer."""
    rows = {row.name: row.replaced_by for row in conversion.converted}
    whole = rows.get(layer, "")
    inside = dict.fromkeys(op for name, op in rows.items() if name.startswith(f"{layer}."))
    found = f"{whole} ({', '.join(inside)})" if whole and inside else whole or ", ".join(inside) or "nothing"
    forwards = [vars(m).get("forward") for m in copied.modules()]
    original = sum(getattr(one, "calls", {}).get("original", 0) for one in forwards)
    return found if not original else f"{found}: the original ran"


def rows_of(name: str, build: Build, tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each variant."""
    torch.manual_seed(0)
    model, layer, few, many = build(tokens)

    def row(variant: str, conversion: ckptkern.Conversion | None = None) -> dict[str, Any]:
        call = captured(model, model.get_submodule(layer), many)
        copied = on_meta(model.get_submodule(layer))
        found = counted(copied, call, variant == "checkpoint")
        given = {"layer": name, "tokens": call.x.numel() // call.x.shape[-1], "variant": variant}
        if conversion is not None:
            given["replaced_by"] = replaced_by(conversion, layer, copied)
        return given | found

    for variant in VARIANTS[:2]:
        yield row(variant)
    for mode in VARIANTS[2:]:
        yield row(mode, ckptkern.convert(model, **few, recompute=mode))


def grouped(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """layer -> variant -> row."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["layer"], {})[row["variant"]] = row
    return {name: of for name, of in found.items() if len(of) == len(VARIANTS)}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown. Four figures in a cell: eager, checkpointed, converted at "selective" and at "full"."""
    lines = ["| layer | becomes | saved, MiB | peak, MiB | ms |", "|---|---|---:|---:|---:|"]
    for name, of in grouped(rows).items():
        cells = [
            " / ".join(f"{float(of[variant][key]) * scale:,.{digits}f}" for variant in VARIANTS)
            for key, scale, digits in (("saved_bytes", 1 / MIB, 0), ("peak_bytes", 1 / MIB, 0), ("seconds", 1e3, 1))
        ]
        lines.append(f"| {name} | {of['full']['replaced_by']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def put(text: str, path: Path) -> None:
    """The table into a page, between its two marks."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path}: has no {BEGIN} with an {END} after it; add both where the table belongs")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of saved bytes and of the estimated time, as shares of the unmodified layer's."""
    from matplotlib.figure import Figure

    of_layers = grouped(rows)
    figure = Figure(figsize=(9, 0.36 * len(of_layers) + 1), layout="constrained")
    colours = ("#c8c8c8", "#e08214", "#2166ac", "#67a9cf")
    labels = ("eager", "torch.utils.checkpoint", 'converted, "selective"', 'converted, "full"')
    columns = (("saved_bytes", "saved for backward"), ("peak_bytes", "peak"), ("seconds", "roofline, H200"))
    for axes, (key, label) in zip(figure.subplots(1, 3, sharey=True), columns, strict=True):
        for i, variant in enumerate(VARIANTS):
            shares = [100 * float(of[variant][key]) / float(of["eager"][key]) for of in of_layers.values()]
            axes.barh([k + 0.2 * (i - 1.5) for k in range(len(shares))], shares, 0.19, color=colours[i])
        axes.set_yticks(range(len(of_layers)), list(of_layers), fontsize=8)
        axes.set_xlabel(f"{label}, % of eager's", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    figure.legend(labels, fontsize=8, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def read(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def written(rows: list[dict[str, Any]], path: Path | None) -> None:
    if path is not None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def main(argv: list[str] | None = None, families: dict[str, Build] = FAMILIES) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dev.layers", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", default="", help="layers whose names have this in them; the others' rows stay in --out"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of a call (default: 8192)")
    parser.add_argument("--out", type=Path, help="the CSV to write, after each layer")
    parser.add_argument("--page", type=Path, help=f"the page that has {BEGIN}, to write the table into")
    parser.add_argument("--picture", type=Path, help="the picture to write")
    args = parser.parse_args(argv)
    for needed in ("transformers", "matplotlib") if args.picture else ("transformers",):
        if hint := missing(needed):
            parser.error(hint)
    names = [name for name in families if args.only.lower() in name.lower()]
    if not names:
        parser.error(f"--only: {args.only!r} is in no name of a layer; they are {', '.join(families)}")
    warnings.filterwarnings("ignore")
    found, failed = {row["layer"]: [] for row in read(args.out)}, []
    for row in read(args.out):
        found[row["layer"]].append(row)
    for i, name in enumerate(names):
        start = time.perf_counter()
        print(f"{i + 1}/{len(names)} {name}", file=sys.stderr, flush=True)
        try:
            found[name] = list(rows_of(name, families[name], args.tokens))
        except ImportError as error:
            print(f"    left out: {error}", file=sys.stderr, flush=True)
            continue
        except Exception:  # is printed, and the others still run
            traceback.print_exc()
            failed.append(name)
            continue
        finally:
            gc.collect()
        shown = table(found[name]).splitlines()[-1]
        print(f"    {shown}  {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        written([row for one in families for row in found.get(one, ())], args.out)
    rows = [row for one in families for row in found.get(one, ())]
    print(table(rows))
    if args.page:
        put(table(rows), args.page)
    if args.picture:
        draw(rows, args.picture)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
