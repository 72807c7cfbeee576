"""A kernel's basic blocks as Python functions on arrays.

Registers are arrays with an element a thread, or scalars where all threads have one value; they are never changed in place,
so that a copy is a reference. A function has R, the registers by number, S, the CTA that runs, and M, the threads that run it
(None: all). It returns the threads that take the jump at its end, or None if all do.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict

import numpy as np

from . import numerics, opcodes
from .ptx import Instruction, Kernel, Unknown, split

SPECIAL = re.compile(r"%(n?tid|n?ctaid)\.[xyz]|%(laneid|warpid)")
NUMBER = re.compile(r"(-?(?:0x[0-9A-Fa-f]+|\d+))U?|0[fd]([0-9A-Fa-f]+)")
# type -> the kind of its register; these are computed in float32 and rounded once
SMALL_FLOATS = {"bf16": "u2", "f16": "u2", "bf16x2": "u4", "f16x2": "u4"}
NUMPY = "where", "isnan", "minimum", "maximum", "fmin", "fmax", "absolute", "negative", "exp2", "sqrt"
NAMES = {
    **numerics.TYPES, **{name: getattr(np, name) for name in NUMPY},
    **{name: value for name, value in vars(numerics).items() if callable(value)},
}  # fmt: skip
REGISTER = re.compile(r"%\w+")


class BlockWriter:
    """The source of one block's function. Opcodes (opcodes.py) read operands, write results and add lines."""

    def __init__(self, kernel: Kernel, number: dict[str, int], constants: dict, outlive: set[str]):
        self.kernel, self.number, self.constants, self.outlive = kernel, number, constants, outlive
        self.lines: list[str] = []
        self.loads: dict[str, str] = {}  # register -> the line that fetches it
        self.known: dict[str, dict[str, str]] = {}  # register -> {kind: variable}
        self.written: dict[str, None] = {}
        self.variables = 0
        self.at: Instruction | None = None

    def emit(self, instruction: Instruction) -> None:
        self.at = instruction
        operation = opcodes.find(instruction)
        if operation is None:
            raise Unknown("unknown opcode", instruction)
        for modifier in instruction.modifiers:
            if not operation.takes(modifier):
                raise Unknown(f"unknown modifier .{modifier}", instruction)
        operation.emit(self, instruction)

    def fail(self, reason: str) -> Unknown:
        return Unknown(reason, self.at)

    def variable(self, expression: str) -> str:
        self.variables += 1
        self.lines.append(f"v{self.variables} = {expression}")
        return f"v{self.variables}"

    def constant(self, value: int, kind: str) -> str:
        name = f"K{kind}_{value & (1 << 64) - 1:x}"
        self.constants[name] = numerics.literal(value, kind)
        return name

    @property
    def where(self) -> str:
        """The instruction itself, for a fault's text."""
        name = f"I{id(self.at)}"
        self.constants[name] = self.at
        return name

    def integer(self, operand: str) -> int | None:
        """The bits of a number that the operand is, or None."""
        match = NUMBER.fullmatch(operand)
        return None if match is None else int(match[1], 0) if match[1] else int(match[2], 16)

    def get(self, operand: str, kind: str) -> str:
        """An expression of an operand's bits, read as `kind`."""
        if (value := self.integer(operand)) is not None:
            return self.constant(value, kind)
        if SPECIAL.fullmatch(operand):
            return f"S.special[{operand!r}].view({kind})"
        if operand == "global_smem":
            return self.constant(0, kind)
        if operand not in self.kernel.registers:
            raise self.fail(f"unknown operand {operand}")
        width = self.kernel.registers[operand]
        if operand not in self.known:
            self.variables += 1
            self.loads[operand] = f"v{self.variables} = R[{self.number[operand]}]"
            self.known[operand] = {f"u{width}" if width else "p": f"v{self.variables}"}
        forms = self.known[operand]
        if kind not in forms:
            have, name = next(iter(forms.items()))
            if "p" in (have, kind):
                raise self.fail(f"{operand} as {kind}")
            if have[1] != kind[1]:  # the low bits of a wider register
                name = f"{name}.view(u{have[1]}).astype(u{kind[1]})"
            forms[kind] = self.variable(f"{name}.view({kind})")
        return forms[kind]

    def set(self, register: str, kind: str, expression: str) -> None:
        """register = expression, of `kind`, in the threads whose predicate holds."""
        if register == "_":
            return
        width = self.kernel.registers[register]
        if kind != "p" and int(kind[1]) != width:  # a wider register is filled up by the value's own kind
            kind, expression = (
                f"{kind[0]}{width}",
                f"({expression}).astype({'u' if kind[0] == 'f' else kind[0]}{width})",
            )
        if self.at.predicate:
            old = (
                self.get(register, kind)
                if register in self.known or register in self.outlive
                else self.constant(0, kind)
            )
            expression = f"where({self.predicate}, {expression}, {old})"
        self.known[register] = {kind: self.variable(expression)}
        self.written[register] = None

    def copy(self, register: str, source: str) -> None:
        width = self.kernel.registers[source]
        self.get(source, f"u{width}" if width else "p")
        self.known[register] = dict(self.known[source])
        self.written[register] = None

    def read(self, operand: str, type: str) -> str:
        """An operand of an arithmetic instruction, in the type that computes."""
        if type in SMALL_FLOATS:
            return f"from_{type}({self.get(operand, SMALL_FLOATS[type])})"
        value = self.get(operand, numerics.kind_of(type))
        return f"flush({value})" if type == "f32" and "ftz" in self.at.modifiers else value

    def write(self, register: str, type: str, expression: str) -> None:
        """The result of an arithmetic instruction, rounded to its type."""
        if type in SMALL_FLOATS:
            return self.set(register, SMALL_FLOATS[type], f"to_{type}({expression})")
        flushed = type == "f32" and "ftz" in self.at.modifiers
        return self.set(register, numerics.kind_of(type), f"flush({expression})" if flushed else expression)

    @property
    def predicate(self) -> str:
        return ("~" if self.at.negated else "") + self.get(self.at.predicate, "p")

    @property
    def mask(self) -> str:
        """The threads that this instruction is for."""
        return f"both(M, {self.predicate})" if self.at.predicate else "M"

    def address(self, operand: str, kind: str) -> str:
        base, *offset = (part.strip() for part in operand.strip("[] ").split("+"))
        constant = int(offset[0], 0) if offset else 0
        return f"({self.get(base, kind)} + {self.constant(constant, kind)})" if constant else self.get(base, kind)

    def vector(self, operand: str) -> list[str]:
        return split(operand[1:-1]) if operand.startswith("{") else [operand]

    def tuple(self, operand: str, kind: str) -> str:
        return "(" + "".join(f"{self.get(part, kind)}, " for part in self.vector(operand)) + ")"

    def source(self, name: str, jump: Instruction | None) -> tuple[str, list[int]]:
        """The function, and the registers it writes that outlive it."""
        taken = "None"
        if jump is not None and jump.predicate:
            self.at = jump
            taken = self.predicate
        stores, saved = [], []
        for register in self.written:
            if register in self.outlive or register in self.loads:
                width = self.kernel.registers[register]
                stores.append(f"R[{self.number[register]}] = {self.get(register, f'u{width}' if width else 'p')}")
                saved.append(self.number[register])
        body = [*self.loads.values(), *self.lines, *stores, f"return {taken}"]
        return "\n    ".join([f"def {name}(R, S, M):", *body]), saved


class Program:
    """A translated kernel: a function a block, and the numbers of the registers that each writes."""

    def __init__(self, ptx: str):
        self.kernel = kernel = Kernel(ptx)
        number = {register: n for n, register in enumerate(kernel.registers)}
        users: defaultdict[str, set[int]] = defaultdict(set)
        for n, block in enumerate(kernel.blocks):
            for instruction in (*block.body, *filter(None, [block.jump])):
                for register in REGISTER.findall(instruction.text):
                    users[register].add(n)
        outlive = {register for register, blocks in users.items() if len(blocks) > 1}
        names, sources = dict(NAMES), []
        self.writes: list[list[int]] = []
        for n, block in enumerate(kernel.blocks):
            writer = BlockWriter(kernel, number, names, outlive)
            for instruction in block.body:
                writer.emit(instruction)
            source, saved = writer.source(f"block{n}", block.jump)
            sources.append(source)
            self.writes.append(saved)
        exec(compile("\n".join(sources), f"<{kernel.name}>", "exec"), names)
        self.blocks = [names[f"block{n}"] for n in range(len(kernel.blocks))]


@functools.lru_cache(maxsize=64)
def translate(ptx: str) -> Program:
    """The program of a kernel's PTX. Unknown: an opcode, modifier or operand that has no meaning here."""
    return Program(ptx)
