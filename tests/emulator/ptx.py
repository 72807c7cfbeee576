"""PTX as Triton writes it: its instructions in basic blocks, and where threads that part at a branch meet again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

STATEMENT = re.compile(
    r"(?:@(?P<negated>!?)(?P<predicate>%\w+)\s+)?(?P<opcode>[a-z]\w*)(?P<modifiers>(?:\.[\w:]+)*)\s*(?P<operands>.*)",
    re.DOTALL,
)
LOCATION = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*?//\s*(.*))?")
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.\w+\s+(?:\.ptr[^,]*?\s)?([\w$]+)\s*(?:,|$)")


class Unknown(NotImplementedError):
    """PTX that the emulator has no meaning for: the statement, its source line, and what is unknown in it."""

    def __init__(self, reason: str, instruction: Instruction):
        super().__init__(f"{reason}: {instruction.text} [{instruction.line}]")


@dataclasses.dataclass(slots=True, eq=False)
class Instruction:
    """`@!predicate opcode.modifiers operands`; `line` is the source line that the compiler names for it."""

    text: str
    predicate: str | None
    negated: bool
    opcode: str
    modifiers: list[str]
    operands: list[str]
    line: str

    @property
    def space(self) -> str:
        return next(
            (m.partition(":")[0] for m in self.modifiers if m.partition(":")[0] in ("param", "shared", "global")), ""
        )

    @property
    def waits(self) -> bool:
        """May threads have to wait here for those of other warps? A block ends there, so that their turn can come."""
        return self.opcode in ("bar", "barrier") and "warp" not in self.modifiers

    @property
    def where(self) -> str:
        return f"{self.text[:80]} [{self.line}]"


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """Instructions without a jump among them, and the jump at their end: to block `target` (EXIT: the thread ends; None: it
    goes on with the next block), taken by the threads whose `predicate` is true."""

    body: list[Instruction]
    target: int | None
    jump: Instruction | None
    meeting: int = -1  # where threads that part at the jump meet again


EXIT = -1


def split(text: str) -> list[str]:
    """Operands at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "{[") - (char in "}]")
        if char == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()] if text[start:].strip() else parts


def inside_braces(text: str) -> str:
    """What the first brace and its partner enclose."""
    depth, start = 0, text.index("{")
    for match in re.finditer(r"//.*|[{}]", text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if match[0] == "}" and not depth:
            return text[start + 1 : match.start()]
    raise ValueError("a brace has no partner")


def statements(text: str) -> Iterator[str]:
    """Statements, and the braces of scopes; a brace inside a statement belongs to an operand."""
    current = ""
    for char in text:
        if char == ";":
            yield current.strip()
            current = ""
        elif char in "{}" and not current.strip():
            yield char
        else:
            current += char


class Kernel:
    """The one entry of a module: name, threads, names of parameters, registers {name: bytes, 0: predicate},
    blocks."""

    def __init__(self, ptx: str):
        head = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)", ptx, re.DOTALL)
        if head is None:
            raise ValueError("no .entry in this PTX")
        self.name = head[1]
        self.parameters = PARAMETER.findall(head[2])
        self.files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(?:.*/)?([^"/]+)"', ptx, re.MULTILINE))
        body = ptx[head.end() :]
        self.threads = int(re.search(r"\.reqntid\s+(\d+)", body)[1])
        self.registers: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._read(inside_braces(body))
        self.blocks = self._blocks()
        for block, meeting in zip(self.blocks, self._meetings(), strict=True):
            block.meeting = meeting

    def widths(self, space: str) -> set[int]:
        """Bytes of the elements that plain loads and stores of a space move."""
        unfused = (i for i in self.instructions if i.opcode in ("ld", "st") and i.space == space)
        return {int(re.sub(r"\D", "", i.modifiers[-1])) // 8 for i in unfused}

    def _read(self, body: str) -> None:
        line, pending, scopes = "", "", Scopes(self.registers)
        jumps: list[tuple[Instruction, list[int]]] = []
        for raw in body.splitlines():
            if match := LOCATION.match(raw):
                line = match[3] or f"{self.files.get(match[1], match[1])}:{match[2]}"
                continue
            text = raw.partition("//")[0].strip()
            if match := re.fullmatch(r"(\$?[\w$]+):", text):
                self.labels[scopes.label(match[1])] = len(self.instructions)
                continue
            if not text or text.startswith((".section", ".pragma")):
                continue
            pending += " " + text
            if not text.endswith((";", "{", "}")):
                continue
            for statement in statements(pending):
                if statement in ("{", "}"):
                    scopes.enter() if statement == "{" else scopes.leave()
                elif statement.startswith(".reg"):
                    scopes.declare(statement)
                elif statement and not statement.startswith("."):
                    self.instructions.append(self._parse(scopes.resolve(statement), line))
                    jumps.append((self.instructions[-1], list(scopes.numbers)))
            pending = ""
        for jump, numbers in jumps:
            if jump.opcode == "bra":
                names = (f"{jump.operands[0]}__{number}" for number in reversed(numbers))
                jump.operands[0] = next((name for name in names if name in self.labels), jump.operands[0])

    @staticmethod
    def _parse(text: str, line: str) -> Instruction:
        match = STATEMENT.fullmatch(text)
        if match is None:
            raise ValueError(f"no PTX statement: {text} [{line}]")
        predicate, modifiers = match["predicate"], match["modifiers"].split(".")[1:]
        return Instruction(
            text, predicate, bool(match["negated"]), match["opcode"], modifiers, split(match["operands"]), line
        )

    def _blocks(self) -> list[Block]:
        code = self.instructions
        jumps = {i.operands[0]: self.labels[i.operands[0]] for i in code if i.opcode == "bra"}
        ends = {n + 1 for n, i in enumerate(code) if i.opcode in ("bra", "ret", "exit") or i.waits}
        starts = [start for start in sorted({0, *jumps.values(), *ends}) if start < len(code)]
        number = {start: n for n, start in enumerate(starts)}
        blocks = []
        for start, stop in zip(starts, [*starts[1:], len(code)], strict=True):
            last = code[stop - 1]
            if last.opcode == "bra":
                blocks.append(Block(code[start : stop - 1], number[self.labels[last.operands[0]]], last))
            elif last.opcode in ("ret", "exit"):
                blocks.append(Block(code[start : stop - 1], EXIT, last))
            else:
                blocks.append(Block(code[start:stop], None, None))
        return blocks

    def _meetings(self) -> list[int]:
        """The immediate post-dominator of every block, the first that all its ways to the end have in common; EXIT: none.

        Sets of blocks are integers, a bit a block; the end is the bit after the last.
        """
        count = len(self.blocks)
        following = []
        for n, block in enumerate(self.blocks):
            conditional = block.jump is not None and block.jump.predicate is not None
            to = set() if block.target is None else {count if block.target == EXIT else block.target}
            following.append(to | ({n + 1} if block.target is None or conditional else set()))
        every = (1 << count + 1) - 1
        sets, changed = [every] * count + [1 << count], True
        while changed:
            changed = False
            for n in reversed(range(count)):
                common = every
                for block in following[n]:
                    common &= sets[block]
                changed |= common | 1 << n != sets[n]
                sets[n] = common | 1 << n
        rest = [sets[n] & ~(1 << n) for n in range(count)]
        return [next((m for m in range(count) if rest[n] >> m & 1 and sets[m] == rest[n]), EXIT) for n in range(count)]


class Scopes:
    """Registers by the scope that declares them; those of inner scopes get a name of their own, as labels do."""

    def __init__(self, registers: dict[str, int]):
        self.registers, self.count = registers, 0
        self.numbers: list[int] = []
        self.renamed: list[dict[str, str]] = []

    def enter(self) -> None:
        self.count += 1
        self.numbers.append(self.count)
        self.renamed.append({})

    def leave(self) -> None:
        self.numbers.pop()
        self.renamed.pop()

    def label(self, name: str) -> str:
        return f"{name}__{self.numbers[-1]}" if self.numbers else name

    def declare(self, statement: str) -> None:
        kind, names = re.fullmatch(r"\.reg\s*\.(\w+)\s+(.*)", statement, re.DOTALL).groups()
        width = 0 if kind == "pred" else int(kind[1:]) // 8
        for name in split(names):
            if match := re.fullmatch(r"(%\w+?)<(\d+)>", name):
                self.registers.update({f"{match[1]}{n}": width for n in range(int(match[2]))})
            else:
                own = f"%{name.strip('%')}__{self.count}"
                self.renamed[-1][name] = own
                self.registers[own] = width

    def resolve(self, statement: str) -> str:
        for names in self.renamed:
            for name, own in names.items():
                statement = re.sub(rf"(?<![\w%.]){re.escape(name)}(?![\w.])", own, statement)
        return statement
