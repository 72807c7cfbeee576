"""The table of opcodes: what each writes into the function of its block, and which modifiers it has a meaning for.

Meanings are those of NVIDIA's "PTX ISA" 8.7; approximate functions (ex2, rcp, ...) are exact here, rounded once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from .numerics import kind_of

TYPE = re.compile(r"[busf](8|16|32|64|128)|pred|bf16|b?f16x2|tf32")
COMPARE = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Operation:
    """`emit(writer, instruction)`; modifiers besides types."""

    emit: Callable
    modifiers: frozenset[str]

    def takes(self, modifier: str) -> bool:
        return bool(TYPE.fullmatch(modifier)) or modifier in self.modifiers


TABLE: dict[str, Operation] = {}


def opcode(names: str, modifiers: str = ""):
    """Enters the function that follows under each of these names."""

    def enter(emit: Callable) -> Callable:
        operation = Operation(emit, frozenset(modifiers.split()))
        TABLE.update(dict.fromkeys(names.split(), operation))
        return emit

    return enter


def find(i) -> Operation | None:
    """By the opcode with its first two modifiers, else by the opcode alone."""
    return TABLE.get(".".join((i.opcode, *i.modifiers[:2]))) or TABLE.get(i.opcode)


# --- arithmetic: result, operands; the last modifier is the type of all


def arithmetic(expression: str) -> Callable:
    def emit(w, i) -> None:
        type = i.modifiers[-1]
        w.write(i.operands[0], type, expression.format(*(w.read(operand, type) for operand in i.operands[1:])))

    return emit


ARITHMETIC = {
    "add": ("{0} + {1}", "rn ftz"), "sub": ("{0} - {1}", "rn ftz"), "neg": ("negative({0})", "ftz"),
    "abs": ("absolute({0})", "ftz"), "rem": ("integer_remainder({0}, {1})", ""),
    "ex2": ("exp2({0}.astype(f8)).astype(f4)", "approx ftz"),
    "rcp": ("(1 / {0}.astype(f8)).astype(f4)", "approx rn ftz"),
    "rsqrt": ("(1 / sqrt({0}.astype(f8))).astype(f4)", "approx ftz"),
    "and": ("{0} & {1}", ""), "or": ("{0} | {1}", ""), "xor": ("{0} ^ {1}", ""), "not": ("~{0}", ""),
}  # fmt: skip
for _name, (_expression, _modifiers) in ARITHMETIC.items():
    opcode(_name, _modifiers)(arithmetic(_expression))


@opcode("div", "full rn approx ftz")
def _div(w, i) -> None:
    arithmetic("{0} / {1}" if "f" in i.modifiers[-1] else "integer_quotient({0}, {1})")(w, i)


@opcode("min max", "NaN ftz relu")
def _extreme(w, i) -> None:
    """Without .NaN the number wins over a NaN. .relu: 0 instead of a negative integer."""
    numbers = "f" in i.modifiers[-1] and "NaN" not in i.modifiers
    extreme = f"f{i.opcode}({{0}}, {{1}})" if numbers else f"{i.opcode}imum({{0}}, {{1}})"
    if "relu" in i.modifiers:
        if i.modifiers[-1] != "s32":
            raise w.fail("unknown form")
        extreme = f"maximum({extreme}, {w.constant(0, 'i4')})"
    arithmetic(extreme)(w, i)


@opcode("mul mad", "lo hi wide rn ftz")
def _mul(w, i) -> None:
    result, a, b, *c = i.operands
    type = i.modifiers[-1]
    kind = "" if type.startswith("bf") or type.endswith("x2") else kind_of(type)  # these have no integer forms
    wide = f"{kind[:1]}{2 * int(kind[1])}" if kind else ""
    if "wide" in i.modifiers:
        matmul = f"{w.get(a, kind)}.astype({wide}) * {w.get(b, kind)}.astype({wide})"
        w.set(result, wide, f"{matmul} + {w.get(c[0], wide)}" if c else matmul)
    elif "hi" in i.modifiers and not c and kind[1] == "4":
        w.set(result, kind, f"high_half({w.get(a, kind)}, {w.get(b, kind)}, {wide})")
    elif "hi" in i.modifiers or (c and "lo" not in i.modifiers):
        raise w.fail("unknown form")
    else:
        matmul = f"{w.read(a, type)} * {w.read(b, type)}"
        w.write(result, type, f"{matmul} + {w.read(c[0], type)}" if c else matmul)


@opcode("fma", "rn ftz relu")
def _fma(w, i) -> None:
    type = i.modifiers[-1]
    if type == "f64" or "relu" in i.modifiers:
        raise w.fail("unknown form")
    arithmetic("fma({0}, {1}, {2})" if type == "f32" else "fma_odd({0}, {1}, {2})")(w, i)


# --- bits


@opcode("shl shr")
def _shift(w, i) -> None:
    kind, amount = kind_of(i.modifiers[-1]), w.integer(i.operands[2])
    value, name = w.get(i.operands[1], kind), "left" if i.opcode == "shl" else "right"
    if amount is not None and amount < 8 * int(kind[1]):
        expression = f"{value} {'<<' if name == 'left' else '>>'} {w.constant(amount, kind)}"
    else:
        expression = f"shift_{name}({value}, {w.get(i.operands[2], 'u4')})"
    w.set(i.operands[0], kind, expression)


@opcode("shf", "l r clamp wrap")
def _shf(w, i) -> None:
    low, high, amount = (w.get(operand, "u4") for operand in i.operands[1:])
    w.set(i.operands[0], "u4", f"funnel({low}, {high}, {amount}, {i.modifiers[0]!r}, {i.modifiers[1]!r})")


@opcode("prmt")
def _prmt(w, i) -> None:
    w.set(i.operands[0], "u4", f"permute_bytes({', '.join(w.get(operand, 'u4') for operand in i.operands[1:])})")


@opcode("bfe")
def _bfe(w, i) -> None:
    kind, (value, *place) = kind_of(i.modifiers[-1]), i.operands[1:]
    position, length = map(w.integer, place)
    if None in (position, length):
        raise w.fail("a bit field of variable place")
    w.set(i.operands[0], kind, f"bit_field({w.get(value, kind)}, {position}, {length})")


# --- moves, choices, conversions


@opcode("mov")
def _mov(w, i) -> None:
    """Also a register into several of equal width, lowest first, or several into one."""
    kind, (to, source), registers = kind_of(i.modifiers[-1]), i.operands, w.kernel.registers
    parts = w.vector(to if to.startswith("{") else source)
    size = 0 if kind == "p" else int(kind[1]) // len(parts)
    if to.startswith("{"):
        value = w.get(source, kind)
        for n, part in enumerate(parts):
            w.set(part, f"u{size}", f"({value} >> {w.constant(8 * size * n, kind)}).astype(u{size})")
    elif source.startswith("{"):
        values = [f"{w.get(part, f'u{size}')}.astype({kind})" for part in parts]
        w.set(to, kind, " | ".join(f"{value} << {w.constant(8 * size * n, kind)}" for n, value in enumerate(values)))
    elif not i.predicate and source in registers and registers[source] == registers[to]:
        w.copy(to, source)
    else:
        w.set(to, kind, w.get(source, kind))


@opcode("cvta", "to global shared param")
def _cvta(w, i) -> None:
    """Addresses are generic already."""
    w.set(i.operands[0], "u8", w.get(i.operands[1], "u8"))


@opcode("selp")
def _selp(w, i) -> None:
    kind = kind_of(i.modifiers[-1])
    yes, no = (w.get(operand, kind) for operand in i.operands[1:3])
    w.set(i.operands[0], kind, f"where({w.get(i.operands[3], 'p')}, {yes}, {no})")


@opcode("setp", f"{' '.join(COMPARE)} equ neu ltu leu gtu geu nan num and or xor ftz")
def _setp(w, i) -> None:
    """Unsuffixed comparisons of floats are false with a NaN, those with u are true."""
    compare, type = i.modifiers[0], i.modifiers[-1]
    sides = [w.variable(w.read(operand, type)) for operand in i.operands[1:3]]
    unordered = f"(isnan({sides[0]}) | isnan({sides[1]}))"
    if compare in ("nan", "num"):
        expression = unordered if compare == "nan" else f"~{unordered}"
    elif compare in COMPARE:
        expression = f"({sides[0]} {COMPARE[compare]} {sides[1]})"
        if compare == "ne" and "f" in type:
            expression = f"({expression} & ~{unordered})"
    else:
        expression = f"(({sides[0]} {COMPARE[compare[:2]]} {sides[1]}) | {unordered})"
    if len(i.operands) == 4:
        sign = {"and": "&", "or": "|", "xor": "^"}[i.modifiers[1]]
        expression = f"{expression} {sign} {w.get(i.operands[3].lstrip('!'), 'p')}"
        if "!" in i.operands[3]:
            raise w.fail("unknown form")
    if type.endswith("x2"):  # a predicate for each half: low|high
        both = w.variable(expression)
        for n, register in enumerate(i.operands[0].split("|")):
            w.set(register, "p", f"{both}[{n}]")
    else:
        w.set(i.operands[0], "p", expression)


@opcode("cvt", "rn rna rni rzi rmi rpi ftz")
def _cvt(w, i) -> None:
    to, of = [m for m in i.modifiers if TYPE.fullmatch(m)]
    mode = next((m for m in i.modifiers if m in ("rni", "rzi", "rmi", "rpi")), None)
    if to.endswith("x2"):  # two values: the high half first
        high, low = (w.read(operand, of) for operand in i.operands[1:])
        return w.set(i.operands[0], "u4", f"pair(to_{to[:-2]}({low}), to_{to[:-2]}({high}))")
    value = w.read(i.operands[1], of)
    if to == "tf32":
        return w.set(i.operands[0], "u4", f"to_tf32({value})")
    if "f" in of and to[0] in "us":
        kind = kind_of(to)
        return w.set(i.operands[0], kind, f"to_integer({value}, {kind}, {mode!r})")
    if mode:
        value = f"round_to_integer({value}, {mode!r})"
    if to in ("f16", "bf16"):
        return w.write(i.operands[0], to, value if "f" in of else f"{value}.astype(f4)")
    kind = kind_of(to)
    return w.write(i.operands[0], to, f"{value}.astype({kind})")


# --- memory


def _element(i) -> tuple[str, int]:
    """(kind of an element's bits, its bytes)"""
    size = int(re.sub(r"\D", "", i.modifiers[-1])) // 8
    return f"u{size}", size


@opcode("ld", "param shared shared::cta global nc volatile v2 v4 v8")
def _ld(w, i) -> None:
    kind = kind_of(i.modifiers[-1])
    if i.space == "param":
        return w.set(i.operands[0], kind, f"S.parameters[{i.operands[1].strip('[] ')!r}].view({kind})")
    registers, (bits, size) = w.vector(i.operands[0]), _element(i)
    address = w.address(i.operands[1], "u4" if i.space == "shared" else "u8")
    values = w.variable(f"S.load({i.space!r}, {address}, {size}, {len(registers)}, {w.mask}, {w.where})")
    for n, register in enumerate(registers):
        w.set(register, bits if kind[0] == "f" else kind, f"{values}[{n}]" + f".view({kind})" * (kind[0] == "i"))


@opcode("st", "shared shared::cta global volatile v2 v4 v8")
def _st(w, i) -> None:
    bits, size = _element(i)
    address = w.address(i.operands[0], "u4" if i.space == "shared" else "u8")
    w.lines.append(f"S.store({i.space!r}, {address}, {size}, {w.tuple(i.operands[1], bits)}, {w.mask}, {w.where})")


# --- threads together


@opcode("shfl", "sync bfly idx up")
def _shfl(w, i) -> None:
    mode, (to, *operands) = i.modifiers[1], i.operands
    if "|" in to or w.integer(operands[2]) != (0 if mode == "up" else 31):
        raise w.fail("unknown form")
    value, lane = (w.get(operand, "u4") for operand in operands[:2])
    w.set(to, "u4", f"S.shuffle({mode!r}, {value}, {lane}, {w.mask}, {w.where})")


@opcode("bar barrier", "sync warp cta aligned arrive")
def _bar(w, i) -> None:
    if "warp" in i.modifiers:
        w.lines.append(f"S.warp_barrier({w.mask}, {w.where})")
    else:
        number, *count = (w.get(operand, "u4") for operand in i.operands)
        w.lines.append(f"S.barrier({number}, {(*count, None)[0]}, {'arrive' not in i.modifiers}, {w.mask}, {w.where})")


@opcode(
    "membar fence",
    "proxy async shared::cta global cta gl sys gpu acq_rel sc",
)
def _fence(w, i) -> None:
    """Other fences order what the checks of races take for unordered until a barrier comes."""
    if "async" in i.modifiers:
        w.lines.append(f"S.proxy_fence({w.mask}, {w.where})")


# --- matrices


@opcode("ldmatrix", "sync aligned m8n8 x1 x2 x4 trans shared shared::cta")
def _ldmatrix(w, i) -> None:
    registers = w.vector(i.operands[0])
    values = w.variable(
        f"S.ldmatrix({w.address(i.operands[1], 'u4')}, {len(registers)}, {'trans' in i.modifiers}, {w.mask}, {w.where})"
    )
    for n, register in enumerate(registers):
        w.set(register, "u4", f"{values}[{n}]")


@opcode("stmatrix", "sync aligned m8n8 x1 x2 x4 trans shared shared::cta")
def _stmatrix(w, i) -> None:
    values = w.tuple(i.operands[1], "u4")
    w.lines.append(
        f"S.stmatrix({w.address(i.operands[0], 'u4')}, {values}, {'trans' in i.modifiers}, {w.mask}, {w.where})"
    )


@opcode("mma", "sync aligned row col m16n8k8 m16n8k16")
def _mma(w, i) -> None:
    to, of = i.modifiers[5], i.modifiers[6]
    if (
        i.modifiers[3:5] != ["row", "col"]
        or (to, i.modifiers[8]) != ("f32", "f32")
        or of not in ("f16", "bf16", "tf32")
    ):
        raise w.fail("unknown form")
    a, b, c = (w.tuple(operand, kind) for operand, kind in zip(i.operands[1:], ("u4", "u4", "f4"), strict=True))
    values = w.variable(f"S.mma({of!r}, {a}, {b}, {c}, {w.mask}, {w.where})")
    for n, register in enumerate(w.vector(i.operands[0])):
        w.set(register, "f4", f"{values}[{n}]")


WGMMA = re.compile(r"m64n(\d+)k(\d+)")
SHAPES = " ".join(f"m64n{n}k{k}" for n in range(8, 257, 8) for k in (8, 16))


@opcode("wgmma", f"fence commit_group wait_group mma_async sync aligned {SHAPES}")
def _wgmma(w, i) -> None:
    kind = i.modifiers[0]
    if kind != "mma_async":
        count = i.operands[0] if kind == "wait_group" else ""
        w.lines.append(f"S.wgmma_{kind}({count + ', ' * bool(count)}{w.mask}, {w.where})")
        return
    registers, (_, a, b, scale, *flags) = w.vector(i.operands[0]), i.operands
    columns, depth = map(int, WGMMA.fullmatch(i.modifiers[3]).groups())
    to, of = i.modifiers[4:6]
    if flags[:2] != ["1", "1"] or to != "f32" or of not in ("f16", "bf16", "tf32"):
        raise w.fail("unknown form")
    left = w.tuple(a, "u4") if a.startswith("{") else w.get(a, "u8")
    transposed = [flag == "1" for flag in flags[2:]]
    values = w.variable(
        f"S.wgmma({columns}, {depth}, {of!r}, {w.tuple(i.operands[0], 'f4')}, {left}, {w.get(b, 'u8')}, {w.get(scale, 'p')}, "
        f"{transposed}, {w.mask}, {w.where})"
    )
    for n, register in enumerate(registers):
        w.set(register, "f4", f"{values}[{n}]")


# --- copies that land later


@opcode("cp", "async cg ca shared shared::cta global commit_group wait_group wait_all")
def _cp(w, i) -> None:
    if "commit_group" in i.modifiers:
        w.lines.append(f"S.commit_copies({w.mask}, {w.where})")
    elif "wait_group" in i.modifiers or "wait_all" in i.modifiers:
        count = i.operands[0] if i.operands else "None"
        w.lines.append(f"S.wait_copies({count}, {w.mask}, {w.where})")
    else:
        to, source, size, *used = i.operands
        amount = w.get(used[0] if used else size, "u4")
        w.lines.append(
            f"S.copy({w.address(to, 'u4')}, {w.address(source, 'u8')}, {w.integer(size)}, {amount}, {w.mask}, {w.where})"
        )


@opcode("trap")
def _trap(w, i) -> None:
    w.lines.append(f"S.trap({w.mask}, {w.where})")
