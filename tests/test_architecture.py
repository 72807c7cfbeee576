"""The architecture: who may import whom, what gets installed, and what a machine without Triton or torch sees."""

import ast
import collections
import graphlib
import importlib
import inspect
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import ckptkern

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = {  # files: package
    "ckptkern/**/*.py": "ckptkern",
    "triton_kernels/*.py": "ckptkern.triton_kernels",
    "benchmarks/*.py": "ckptkern.benchmarks",
}
OWN = {  # run from a checkout
    "benchmarks/*/**/*.py": "benchmarks",
    "examples/**/*.py": "examples",
    "tests/codegen/*.py": "codegen",
    "tests/emulator/*.py": "emulator",
}

# A part imports from itself and from parts of lower layers. "ckptkern" itself is the top: it imports anything,
# and ours import nothing from it except its version.
LAYERS = {
    "errors": 0,
    "results": 0,
    "triton_kernels": 1,
    "memory": 0,
    "bits": 0,
    "subclasses": 0,
    "extras": 0,
    "state": 1,
    "frozen": 1,
    "storage": 2,
    "eager": 2,
    "ops": 3,
    "segments": 4,
    "nn": 5,
    "conversion": 6,
    "parallel": 7,
    "planning": 7,
    "tools": 8,
    "hub": 8,
    "integrations": 8,
    "benchmarks": 9,
    "__main__": 10,
}
TRITON_ON_FIRST_USE = {"ops", "tools", "benchmarks"}
WITH_EXTRAS = {"benchmarks", "conversion", "extras", "frozen", "hub", "integrations", "planning", "tools", "__main__"}

# Likewise the folders and files of ops, which import from those of lower layers.
OPS_LAYERS = {
    "dispatch": 0,
    "registration": 1,
    "sublayer": 2,
    "mlp": 3,
    "attention": 3,
    "cross_entropy": 3,
    "experts": 3,
    "moe": 4,
    "distillation": 4,
    "transformer_layer": 5,
    "sharded": 5,
}

# Of names, operators, numbers and strings: a heavier file or function usually does two things. Lines are the formatter's.
TOKENS, FUNCTION_TOKENS = 6000, 1100


class Import(NamedTuple):
    module: str
    target: str  # absolute
    relative: bool
    lazy: bool  # inside a function


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def folder_of(module: str) -> str | None:
    """The folder or file of ops that a module is in; None for others and for ops itself."""
    return module.split(".")[2] if module.startswith("ckptkern.ops.") else None


def imports_of(module: str, is_package: bool, source: str, modules: set[str]) -> Iterator[Import]:
    package = module if is_package else module.rpartition(".")[0]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, False, lazy)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*above, *filter(None, [child.module])])
                for alias in child.names:  # `from .. import state` names a module, `from .state import draw` does not
                    inner = f"{base}.{alias.name}"
                    yield Import(module, inner if inner in modules else base, child.level > 0, lazy)
            yield from visit(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return visit(ast.parse(source), False)


def files(folders: dict[str, str] = INSTALLED) -> dict[Path, str]:
    """Sources, and their paths below the folder of their package's parent."""
    paths = {}
    for pattern, package in folders.items():
        folder = ROOT / pattern.partition("/*")[0]
        for path in sorted(ROOT.glob(pattern)):
            paths[path] = f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}"
    return paths


def sources(folders: dict[str, str] = INSTALLED) -> dict[str, tuple[bool, str]]:
    tree = {}
    for path, inner in files(folders).items():
        module = inner.removesuffix(".py").replace("/", ".")
        tree[module.removesuffix(".__init__")] = path.name == "__init__.py", path.read_text()
    return tree


def violations(tree: dict[str, tuple[bool, str]]) -> list[str]:
    modules = {*tree}
    wrong = [f"{module} has no layer" for module in tree if part(module) not in {*LAYERS, "ckptkern"}]
    for module, (is_package, source) in tree.items():
        here = part(module)
        for statement in imports_of(module, is_package, source, modules):

            def complain(why: str, statement: Import = statement) -> None:
                wrong.append(f"{statement.module} imports {statement.target}: {why}")

            top = statement.target.split(".")[0]
            if top == "ckptkern":
                there = part(statement.target)
                if not statement.relative and "torch-universal" not in module:  # a kernels repository, loaded by path
                    complain("not relative")
                if there == "triton_kernels" != here and not (statement.lazy and here in TRITON_ON_FIRST_USE):
                    complain("kernels are imported on first use, by ops, tools and benchmarks")
                if here not in ("ckptkern", there) and LAYERS.get(there, -1) >= LAYERS.get(here, 0):
                    complain(f"{here} lies no higher than {there}")
                inside, target = folder_of(module), folder_of(statement.target)
                if None not in (inside, target) and inside != target and OPS_LAYERS[target] >= OPS_LAYERS[inside]:
                    complain(f"{inside} lies no higher than {target}")
            elif top == "triton":
                if here != "triton_kernels" and not (statement.lazy and here in TRITON_ON_FIRST_USE):
                    complain("triton is imported on first use, by ops, tools and benchmarks")
            elif top in ("benchmarks", "codegen", "emulator"):
                complain("not installed")
            elif top not in ("torch", "ninja", *sys.stdlib_module_names) and here not in WITH_EXTRAS:
                complain("not a dependency")
    return wrong


@pytest.mark.slow
def test_imports_keep_to_the_layers():
    tree = sources()
    assert {part(module) for module in tree} >= {"ckptkern", "state", "ops", "nn", "triton_kernels", "benchmarks"}
    assert violations(tree) == []


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        ("ckptkern.other", "", "no layer"),
        ("ckptkern.ops.sublayer.dropout", "from ..mlp import mlp", "no higher"),
        ("ckptkern.ops.mlp.mlp", "def f():\n    from ..attention.core import attend", "no higher"),
        ("ckptkern.state", "from .ops import mlp", "no higher"),
        ("ckptkern.ops.experts", "def f():\n    from ..nn import MLP", "no higher"),
        ("ckptkern.ops.experts", "from .. import nn", "no higher"),
        ("ckptkern.triton_kernels.mlp", "from .. import state", "no higher"),
        ("ckptkern.ops.experts", "import triton", "first use"),
        ("ckptkern.nn.mlp", "def f():\n    import triton.language as tl", "first use"),
        ("ckptkern.ops.experts", "from ..triton_kernels import mlp", "first use"),
        ("ckptkern.ops.experts", "import ckptkern.state", "not relative"),
        ("ckptkern.benchmarks.run", "from ckptkern.state import draw", "not relative"),
        ("ckptkern.tools.env", "def f():\n    from emulator import run", "not installed"),
        ("ckptkern.ops.experts", "if True:\n    import numpy", "not a dependency"),
    ],
)
def test_the_walker_sees(module, source, why):
    tree = dict.fromkeys(("ckptkern", "ckptkern.ops", "ckptkern.ops.mlp", "ckptkern.nn", "ckptkern.state"), (True, ""))
    wrong = violations({**tree, module: (False, source)})
    assert len(wrong) >= 1
    assert any(why in line for line in wrong), wrong


def circle(tree: dict[str, tuple[bool, str]]) -> list[str]:
    """Modules that import each other, by any import: lazy ones and those for type checkers too."""
    edges = {
        module: {statement.target for statement in imports_of(module, is_package, source, {*tree})} & {*tree}
        for module, (is_package, source) in tree.items()
    }
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.slow
def test_no_module_imports_itself_through_others():
    assert circle(sources(INSTALLED | OWN)) == []


@pytest.mark.parametrize(
    "source",
    ["from .other import f", "def f():\n    from . import other", "if TYPE_CHECKING:\n    from .third import f"],
)
def test_a_circle_is_seen(source):
    package = {"ckptkern.eager": (True, "from . import one"), "ckptkern.eager.third": (False, "from .other import f")}
    modules = {"ckptkern.eager.one": (False, source), "ckptkern.eager.other": (False, "from .one import g")}
    assert {"ckptkern.eager.one", "ckptkern.eager.other"} <= {*circle({**package, **modules})}
    assert circle({**package, **modules, "ckptkern.eager.other": (False, "")}) == []


def token_lines(source: str) -> list[int]:
    """Returns the line of each name, operator, number and string."""
    counted = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.start[0] for token in tokens if token.type in counted]


def too_heavy(tree: dict[str, tuple[bool, str]]) -> dict[str, int]:
    """Returns the tokens of files and functions, by their dotted names, that have more than they should."""
    heavy = {}
    for module, (_, source) in tree.items():
        lines = token_lines(source)
        sizes = {module: (len(lines), TOKENS)}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own = sum(node.lineno <= line <= node.end_lineno for line in lines)
                sizes[f"{module}.{node.name}"] = own, FUNCTION_TOKENS
        heavy |= {name: size for name, (size, limit) in sizes.items() if size > limit}
    return heavy


@pytest.mark.slow
def test_files_and_functions_are_light():
    assert too_heavy(sources(INSTALLED | OWN)) == {}


def test_a_heavy_file_and_a_heavy_function_are_seen():
    head = "def f(x):\n    x = 0\n"  # nine tokens
    function = head + "    x += 1\n" * ((FUNCTION_TOKENS - 9) // 3)
    assert too_heavy({"ckptkern.m": (False, function)}) == {}
    assert too_heavy({"ckptkern.m": (False, function + "    x += 1\n")}) == {"ckptkern.m.f": FUNCTION_TOKENS + 1}
    file = "x = 1\n" * (TOKENS // 3)
    assert too_heavy({"ckptkern.m": (False, file)}) == {}
    assert too_heavy({"ckptkern.m": (False, file + "x = 1\n")}) == {"ckptkern.m": TOKENS + 3}


def called_once(tree: dict[str, str]) -> list[str]:
    """Returns the functions of at most six lines besides the docstring that one place calls, and no other refers to: a reader
    would meet them where they are called. Methods that several classes define are an interface, and so is what csrc names."""
    parsed = {module: ast.parse(source) for module, source in tree.items()}
    nodes = [node for module in parsed.values() for node in ast.walk(module)]
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    uses = collections.defaultdict(list)
    methods = collections.Counter(2 * re.findall(r'{"(\w+)"', "".join(map(Path.read_text, ROOT.glob("csrc/*.cpp")))))
    importers: dict[str, set[str]] = collections.defaultdict(set)
    for module, root in parsed.items():
        for node in ast.walk(root):
            if isinstance(node, ast.Attribute):
                uses[node.attr].append((None, id(node) in called))
            elif isinstance(node, ast.Name):
                uses[node.id].append((module, id(node) in called))
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    importers[alias.name].add(module)
            elif isinstance(node, ast.ClassDef):
                methods.update(method.name for method in node.body if isinstance(method, ast.FunctionDef))
    names = []
    for module, root in parsed.items():
        for node in [
            *root.body,
            *(member for own in root.body if isinstance(own, ast.ClassDef) for member in own.body),
        ]:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("__") or methods[node.name] > 1:
                continue
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            lines = (
                node.end_lineno - node.lineno + 1 - (docstring.end_lineno - docstring.lineno + 1 if docstring else 0)
            )
            homes = {None, module, *importers[node.name]}
            own = [is_call for home, is_call in uses[node.name] if home in homes]
            if lines <= 6 and own == [True]:
                names.append(f"{module}.{node.name}")
    return names


def test_few_short_functions_have_one_caller():
    short, long = "    return 1\n", "    x = 1\n" * 6 + "    return x\n"
    source = "def f():\n{}\n\ndef g():\n    return {}\n"
    assert called_once({"m": source.format(short, "f()")}) == ["m.f"]
    assert called_once({"m": source.format(short, "f() + f()")}) == called_once({"m": source.format(long, "f()")}) == []
    assert called_once({"m": source.format(short, "map(f, x)")}) == []
    own = {name: source for name, (_, source) in sources({"ckptkern/**/*.py": "ckptkern"}).items()}
    once = called_once(own)
    assert len(once) <= 60, "\n".join(once)


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_imports_no_kernels_and_no_extras_and_runs_without_triton(tmp_path):
    code = """
import sys
import torch.utils.flop_counter  # imports triton itself

class Triton:
    def find_spec(name, *_):
        if name.partition(".")[0] == "triton":
            tried.append(name)
            raise ImportError("there is no triton")

for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
    del sys.modules[name]
before, tried = set(sys.modules), []
sys.meta_path.insert(0, Triton)
import ckptkern
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(tried, sorted(new & {"numpy", "rich", "matplotlib", "pandas"}), "ckptkern.triton_kernels" in sys.modules)
x = torch.ones(3, 8, requires_grad=True)
ckptkern.nn.MLP(8)(x).sum().backward()
assert x.grad.abs().sum() > 0
"""
    result = run_python(code, tmp_path)
    assert (result.stdout, result.stderr) == ("[] [] False\n", "")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the source tree without what git ignores."""
    copy = tmp_path_factory.mktemp("source") / "ckptkern"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "demo_output", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


WITHOUT_TORCH = "import sys, runpy; sys.modules['torch'] = None; sys.argv = {argv}; runpy.run_path('setup.py')"


def test_an_extension_inside_needs_torch(tree):
    code = WITHOUT_TORCH.format(argv=["setup.py", "dist_info"])
    result = run_python(f"import os; os.environ['CKPTKERN_WITH_EXTENSION'] = '1'; {code}", tree)
    assert result.returncode == 1
    assert "CKPTKERN_WITH_EXTENSION=1 compiles the extension for the torch that is installed" in result.stderr


@pytest.mark.slow
def test_sdist_holds_all_that_a_build_needs(tree):
    result = run_python(WITHOUT_TORCH.format(argv=["setup.py", "--quiet", "sdist", "--dist-dir", "sdist"]), tree)
    assert result.returncode == 0, result.stderr
    with tarfile.open(next((tree / "sdist").glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        path.relative_to(ROOT).as_posix()
        for folder in ("csrc", "ckptkern", "triton_kernels", "benchmarks", "tests", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".typed")
    ]
    assert {"csrc/philox.h", "triton_kernels/__init__.py"} <= set(wanted)
    assert {*wanted, "setup.py", "pyproject.toml", "LICENSE", "README.md"} - names == set()


@pytest.mark.slow
def test_one_wheel_for_every_machine_installs_nothing_at_top_level(tree):
    argv = ["setup.py", "--quiet", "bdist_wheel", "--dist-dir", "dist"]
    result = run_python(WITHOUT_TORCH.format(argv=argv), tree)
    assert result.returncode == 0, result.stderr
    (path,) = (tree / "dist").glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        init = wheel.read("ckptkern/__init__.py").decode()
    assert {re.split("[/-]", name)[0] for name in names} == {"ckptkern"}
    assert {name for name in names if name.endswith(".py")} == {*files().values()}
    sources = {f"ckptkern/csrc/{path.name}" for path in (ROOT / "csrc").iterdir()}
    assert len(sources) > 5 and {"ckptkern/py.typed", *sources} <= names  # noqa: PT018
    version = re.search(r"^Version: (.*)$", metadata, re.MULTILINE)[1]
    assert "+" not in version  # no index accepts a local version
    assert f'\n__version__ = "{version}"\n' in init


# how a launcher runs, which no reference implementation has
LAUNCH = {"tile", "tiles", "blocks", "block_m", "programs"}


def test_every_launcher_has_a_definition_of_its_name_and_signature_in_the_file_of_its_name():
    triton_kernels = pytest.importorskip("ckptkern.triton_kernels")

    def parameters(function) -> list[tuple]:
        return [
            (p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values() if p.name not in LAUNCH
        ]

    for name in triton_kernels.__all__:
        launcher = getattr(triton_kernels, name)
        module = f"ckptkern.eager.{launcher.__module__.rpartition('.')[2]}"
        if not hasattr(ckptkern.eager, name):  # which ops call of kernels alone
            module = "support.launchers"
        reference = getattr(importlib.import_module(module), name)
        assert reference.__module__ == module, name
        assert parameters(reference) == parameters(launcher), name


def built_by_place(source: str) -> list[str]:
    """The calls of an Options with values that have no name."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [ast.unparse(call) for call in calls if call.args and ast.unparse(call.func).endswith("Options")]


def test_options_are_built_by_name():
    """Two swapped values of one type raise nothing; `test_properties.py` looks at the values of those built by place."""
    assert built_by_place("def f(a, b):\n    return _apply(SomeOptions(a, last=b))") == ["SomeOptions(a, last=b)"]
    calls_of = {
        name: built_by_place(source) for name, (_, source) in sources().items() if name.startswith("ckptkern.ops.")
    }
    assert {name for name, calls in calls_of.items() if calls} == set()


def public_callables() -> Iterator[tuple[str, object]]:
    parallel = importlib.import_module("ckptkern.parallel")  # not imported by ckptkern, because it takes a second
    for module in (ckptkern, ckptkern.nn, ckptkern.storage, ckptkern.memory, parallel):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing):
                yield from ((f"{name}.{m}", vars(thing)[m]) for m in ("__init__", "forward") if m in vars(thing))
            elif callable(thing):
                yield name, thing


def test_public_functions_are_annotated():
    """py.typed promises types, and an argument without one is Any."""
    missing = [
        f"{name}: {parameter.name}"
        for name, function in public_callables()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.annotation is parameter.empty
        and parameter.name != "self"
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    assert missing == []
