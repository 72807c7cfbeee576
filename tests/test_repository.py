"""What a code host reads of the repository: workflows that run what .ci/run and setup.py name, forms, citation, release notes.

The workflows themselves run only on that host.
"""

import re
from itertools import product

import pytest
from test_architecture import ROOT
from test_setup import VERSION

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which requirements-dev.txt pins")
HOST = ROOT / ".github"
pytestmark = pytest.mark.skipif(not HOST.is_dir(), reason="an sdist leaves out .github")
FILES = {path.relative_to(ROOT).as_posix(): path for path in (*HOST.rglob("*.yml"), ROOT / "CITATION.cff")}


def load(name: str) -> dict:
    """The file's content; YAML 1.1 reads the key `on` as True."""
    content = yaml.safe_load((ROOT / name).read_text())
    return {"on" if key is True else key: value for key, value in content.items()}


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def commands(name: str) -> list[str]:
    """What a workflow's steps run, with the values of a matrix's `include` in the place of `matrix.run`."""
    workflow = load(name)
    included = [
        row["run"]
        for job in workflow["jobs"].values()
        for row in job.get("strategy", {}).get("matrix", {}).get("include", [])
    ]
    return [step["run"] for step in steps(workflow) if "run" in step and step["run"] != "${{ matrix.run }}"] + included


@pytest.mark.parametrize("name", [name for name in FILES if "/workflows/" in name])
def test_a_workflow_may_only_read_and_runs_targets_that_exist(name):
    workflow = load(name)
    assert {"name", "on", "permissions", "jobs"} <= {*workflow}
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job or "needs" in job for job in workflow["jobs"].values())
    assert all(("run" in step) != ("uses" in step) for step in steps(workflow))
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps(workflow) if "uses" in step)
    targets = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    assert {target for command in commands(name) for target in re.findall(r"\bmake ([a-z-]+)", command)} <= targets


def test_a_target_of_make_is_defined_once():
    targets = re.findall(r"^([\w.-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(targets) == sorted({*targets})


def test_the_workflow_runs_the_lines_of_the_script():
    lines = [line for line in (ROOT / ".ci/run").read_text().splitlines() if re.match(r"(\w+=\w+ )?make ", line)]
    assert sorted([*lines, "make install"]) == sorted(commands(".github/workflows/ci.yml"))


def test_wheels_are_built_for_the_releases_of_setup_py():
    listed = re.search(r"^TORCH_RELEASES = \[(.*?)\]", (ROOT / "setup.py").read_text(), re.MULTILINE)[1]
    pythons = re.search(r"^pythons=\$\{PYTHONS:-(.*)\}$", (ROOT / ".ci/wheels").read_text(), re.MULTILINE)[1].split()
    matrix = load(".github/workflows/wheels.yml")["jobs"]["wheel"]["strategy"]["matrix"]
    assert [*product(matrix["torch"], matrix["python"])] == [*product(re.findall(r"[\d.]+", listed), pythons)]
    assert all((row["torch"] in matrix["torch"]) and (row["python"] in matrix["python"]) for row in matrix["exclude"])


@pytest.mark.parametrize("name", [name for name in FILES if "/ISSUE_TEMPLATE/" in name and "config" not in name])
def test_a_form_has_what_the_host_requires_and_asks_each_thing_once(name):
    form = load(name)
    assert all(form[key] for key in ("name", "description", "body"))
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert asked
    assert {field["type"] for field in form["body"]} <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in asked)
    assert len({field["id"] for field in asked}) == len(asked)


def test_citation_and_changelog_are_of_this_version():
    citation = load("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= {*citation}
    assert str(citation["version"]) == VERSION
    assert (ROOT / "CHANGELOG.md").read_text().startswith(f"# Changelog\n\n## {VERSION}")
