"""Every file of examples/ runs as its docstring says, trains, fetches nothing and leaves nothing behind; what those of
TRL's trainers train and allocate is compared.

The page docs/how-to/recipes.md includes the files themselves, so what it shows is what runs here.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkern.extras import missing
from ckptkern.memory import parse_size

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = "__init__", "tutorials"  # of tests/examples
RECIPES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem not in PROGRAMS}
QUICK = "plain_loop"  # converts and trains in seconds; the others run in `make test-all`


def line(recipe: str, word: str) -> list[str]:
    """What stands after the word in the file's docstring."""
    docstring = ast.get_docstring(ast.parse(RECIPES[recipe].read_text()))
    match = re.search(rf"^{word}: (.*)$", docstring, re.MULTILINE)
    return match[1].split() if match else []


def packages(recipe: str) -> list[str]:
    command = line(recipe, "Install")
    assert command[:2] in ([], ["pip", "install"])
    return command[2:]


def command(recipe: str) -> list[str]:
    program, *options, file = line(recipe, "Run")
    assert ROOT / file == RECIPES[recipe]
    # --standalone takes a free port.
    start = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}[program]
    return [sys.executable, *start, *options, str(RECIPES[recipe])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [QUICK, *(pytest.param(recipe, marks=pytest.mark.long) for recipe in RECIPES if recipe != QUICK)]
)
def test_recipe(recipe, tmp_path):
    if reason := missing(*(package.replace("-", "_") for package in packages(recipe))):
        pytest.skip(reason)
    check_trained(outcome(tmp_path, *command(recipe)))


def outcome(folder: Path, *command: str) -> str:
    """What a program prints that ends well in an empty folder, and leaves it empty."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        command, env=environment | {"HF_HUB_OFFLINE": "1"}, cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert list(folder.iterdir()) == []
    return result.stdout


def check_trained(output: str) -> None:
    trained = re.findall(r"^(loss|reward) (\d+\.\d+) -> (\d+\.\d+)$", output, re.MULTILINE)
    assert trained, output
    for column, first, last in trained:
        assert float(last) < float(first) / 2 if column == "loss" else float(last) > float(first) + 0.2, output


LOGITS = {"sft": 2 * 128, "dpo": 4 * 2 * 32, "grpo": 8 * 32}  # tokens of a batch, of 2,048 classes in float32


@pytest.mark.long
@pytest.mark.parametrize("trainer", LOGITS)
def test_a_converted_model_trains_as_the_trainers_own(trainer, tmp_path):
    """Fused in every call, in less memory and without logits."""
    if reason := missing(*packages("trl_trainers")):
        pytest.skip(reason)
    output = outcome(tmp_path, sys.executable, str(ROOT / "tests/support/trainers.py"), trainer)
    check_trained(output)
    rows = re.findall(r"^(.+): peak (.+), largest tensor (.+)$", output, re.MULTILINE)
    names, peaks, largest = zip(*((name, parse_size(peak), parse_size(size)) for name, peak, size in rows), strict=True)
    assert names == ("as it is", "gradient checkpointing", "converted")
    assert peaks[2] < peaks[1] < peaks[0], output
    assert largest[2] < LOGITS[trainer] * 2048 * 4 < largest[0], output
    assert re.search(r"^calls \{'fused': [1-9]\d*, 'checkpointed': 0, 'original': 0\}$", output, re.MULTILINE), output
    assert float(re.search(r"^largest difference: (.+)$", output, re.MULTILINE)[1]) < 1e-3, output


def test_what_a_recipe_imports_is_installed_by_its_command_and_pinned():
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    for recipe, path in RECIPES.items():
        installed = packages(recipe)
        assert {*installed} <= {*pinned}, recipe
        tree = ast.parse(path.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        roots = {"ckptkern", "torch", *sys.stdlib_module_names, *(name.replace("-", "_") for name in installed)}
        assert {name.partition(".")[0] for name in imported} <= roots, recipe
        assert not imported & {*RECIPES}, "Python would import the file instead"
        assert command(recipe)[-1] == str(path)


def test_the_page_shows_every_recipe():
    page = (ROOT / "docs/how-to/recipes.md").read_text()
    shown = re.findall(r'^```python\n--8<-- "examples/(\w+)\.py"\n```$', page, re.MULTILINE)
    assert sorted(shown) == [*RECIPES]
