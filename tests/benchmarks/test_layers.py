"""What the table of one layer of each family says of a small layer: what is saved, what the peak has in it, and what stays of
a file."""

from __future__ import annotations

import csv
import re

import pytest
import torch
from support.architectures import ARCHITECTURES, HEADS, WIDTH

from benchmarks.dev import layers, shapes

TOKENS, ITEM = 64, 2


def small(tokens, name="llama"):
    """Two samples."""
    model = ARCHITECTURES[name].model().bfloat16()
    few, many = ({"ids": torch.randint(0, 5, (2, columns))} for columns in (6, tokens // 2))
    return shapes.Layer(model, "layers.0", few, many)


@pytest.fixture(scope="module")
def rows():
    return {row["variant"]: row for row in layers.rows_of("small", small, TOKENS)}


def test_what_is_saved(rows):
    x, o, lse = TOKENS * WIDTH * ITEM, TOKENS * WIDTH * ITEM, TOKENS * HEADS * 4
    saved = {variant: row["saved_bytes"] for variant, row in rows.items()}
    assert saved == {"eager": saved["eager"], "checkpoint": x, "selective": x + o + lse, "full": x}
    assert {row["tokens"] for row in rows.values()} == {TOKENS}
    assert rows["selective"]["replaced_by"] == rows["full"]["replaced_by"] == "transformer_layer"


def test_the_peak_has_no_scores_in_it(rows):
    """Scores would make it quadratic; a bounded part of it is of the parameters' gradients."""
    longer = {row["variant"]: row for row in layers.rows_of("small", small, 4 * TOKENS)}
    for variant, row in rows.items():
        assert row["saved_bytes"] < row["peak_bytes"] < longer[variant]["peak_bytes"] <= 4 * row["peak_bytes"], variant
        assert 0 < float(row["seconds"]) < float(longer[variant]["seconds"]), variant


def test_a_forward_that_does_not_run_shows():
    model, name, few, many = small(TOKENS)
    conversion = layers.ckptkern.convert(model, **few)
    call = layers.captured(model, model.get_submodule(name), many)
    copied = layers.on_meta(model.get_submodule(name))
    layers.counted(copied, call)
    assert layers.replaced_by(conversion, name, copied) == "transformer_layer"
    copied.forward.calls["original"] += 1
    assert layers.replaced_by(conversion, name, copied) == "transformer_layer: the original ran"


def test_the_files(tmp_path, capsys):
    """Layers that a run leaves out stay as they were; one that fails is named and makes the run fail."""

    def raises(error):
        raise error

    families = {"other": small, "one": small}
    families |= {
        "broken": lambda n: raises(RuntimeError("broken")),
        "absent": lambda n: raises(ImportError("no library")),
    }
    out, page, picture = (tmp_path / name for name in ("rows.csv", "page.md", "picture.png"))
    page.write_text(f"before\n{layers.BEGIN}\nold\n{layers.END}\nafter\n")
    old = [dict.fromkeys(layers.COLUMNS, "7") | {"layer": "other", "variant": variant} for variant in layers.VARIANTS]
    layers.written(old, out)
    given = f"--out {out} --page {page} --picture {picture} --tokens {TOKENS} --only one"
    assert layers.main(given.split(), families) == 0
    found = list(csv.DictReader(out.read_text().splitlines()))
    assert found[:4] == old
    assert [row["layer"] for row in found[4:]] == ["one"] * 4
    text = page.read_text()
    assert re.fullmatch(r"before\n.*\| other \| 7 \|.*\| one \| transformer_layer \|.*\nafter\n", text, re.DOTALL)
    assert "old" not in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert layers.main(["--only", "b"], families) == 1
    errors = capsys.readouterr().err
    assert "failed: broken" in errors
    assert "left out: no library" in errors
    with pytest.raises(SystemExit):
        layers.main(["--only", "none of these"], families)


def test_a_page_without_the_marks_is_refused(tmp_path):
    (tmp_path / "page.md").write_text(f"{layers.END}\n{layers.BEGIN}\n")
    with pytest.raises(ValueError, match="add both where the table belongs"):
        layers.put("table", tmp_path / "page.md")
