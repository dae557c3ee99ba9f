"""The picture of the step times of all plans."""

import pytest

from train.pictures import check_picture, plot_plans

COMPOSED = {
    "data=8": [(0.2, False), (0.5, True)],
    "data=4 × model=2": [(0.3, True)],
    "model=8": [(0.9, False)],
}


def test_picture_shows_the_fastest_fitting_mesh_first(tmp_path):
    out = tmp_path / "plans.svg"
    plot_plans(COMPOSED, {"data=8": 0.45}, out)
    text = out.read_text()
    order = [text.index(f"<!-- {mesh} -->") for mesh in ("data=4 × model=2", "data=8", "model=8")]
    assert order == sorted(order)
    for label in ("composed, fits", "composed, does not fit into memory", "compiled"):
        assert f"<!-- {label} -->" in text


def test_file_that_is_no_picture_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"plans\.txt"):
        plot_plans(COMPOSED, {}, tmp_path / "plans.txt")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plans.foo", r"--picture=\S+plans\.foo must end with one of \.\w+, .*\.svg"),
        ("plans", "must end with one of"),
        ("nowhere/plans.svg", r"the directory \S+nowhere does not exist; create it"),
        ("", "is a directory; add the name of a file"),
    ],
)
def test_pictures_are_checked_before_the_work(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        check_picture("--picture", tmp_path / name)
    check_picture("--picture", tmp_path / "plans.SVG")
    check_picture("--picture", None)
