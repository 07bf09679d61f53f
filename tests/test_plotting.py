"""What is drawn of a result: which panels, which axes, which colours; rendered to PNG and read back as an image."""

import io

import numpy as np
import pytest

import attnspec
from attnspec import plotting

RECORDS = attnspec.formulas()


def panels(name, *, sizes=None, **options):
    record = RECORDS[name]
    arrays = record.draw(sizes)
    return plotting.panels_of(record, arrays, record.function(**arrays, **options))


def test_weights_come_first_and_heads_one_by_one():
    found = panels("cog_attention", sizes={"n": 3, "m": 5, "h": 2}, return_weights=True)
    assert [(p.title, p.values.shape, p.rows, p.columns, p.scale) for p in found] == [
        ("cog_attention weights, head 0", (3, 5), "query", "key", "weights"),
        ("cog_attention weights, head 1", (3, 5), "query", "key", "weights"),
    ]


def test_weights_over_pairs_are_one_panel_a_query_and_no_more_than_eight():
    found = panels("tensor_attention", sizes={"n": 9, "m1": 2, "m2": 3}, return_weights=True)
    assert len(found) == 8
    assert (found[0].title, found[0].rows, found[0].columns) == ("tensor_attention weights, query 0", "first key", "second key")
    assert found[-1].title == "tensor_attention weights, query 7 (8 of 9 shown)"


def test_a_curve_lies_over_the_array_it_belongs_to():
    (panel,) = panels("linear_clipping")
    assert panel.columns == "x"
    np.testing.assert_array_equal(panel.values, attnspec.linear_clipping(panel.x))


def test_numbers_are_bars():
    (panel,) = panels("sdm_fit_beta")
    assert panel.labels == ("beta", "bias")


@pytest.mark.parametrize("values, cmap, limits", [
    ([[0.25, 0.75]], "cividis", (0.0, 0.75)),
    ([[-0.5, 0.25]], "PuOr", (-0.5, 0.5)),
    ([[0.0, 0.0]], "cividis", (0.0, 1.0)),
    ([[np.nan, -np.inf, 2.0]], "cividis", (0.0, 2.0)),
])
def test_colours(values, cmap, limits):
    got = plotting.colours_of([np.array(values)])
    assert (got["cmap"], got["vmin"], got["vmax"]) == (cmap, *limits)


@pytest.mark.parametrize("values", [np.eye(3), -np.eye(3), np.ones((1, 40)), np.zeros((0, 3)), np.arange(3.0), np.full((2, 2), np.nan)])
def test_it_can_be_drawn(values):
    from matplotlib.image import imread

    file = io.BytesIO()
    plotting.draw([plotting.Panel("title", values)], file, "png")
    file.seek(0)
    picture = imread(file)
    assert picture.ndim == 3
    assert picture.std() > 0
