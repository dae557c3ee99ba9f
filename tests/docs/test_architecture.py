"""The picture in docs/architecture.md shows the current imports."""

from docs.draw_architecture import PICTURE, draw, rows_of, without_implied


def test_picture_is_up_to_date():
    message = "run `python -m docs.draw_architecture`"
    assert PICTURE.read_text(encoding="utf-8") == draw(), message


def test_reduced_leaves_out_edges_that_follow_from_others():
    imports = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert without_implied(imports) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_rows_put_every_folder_below_its_importers():
    imports = {"train": {"data", "sharding"}, "data": set(), "sharding": set()}
    assert rows_of(imports) == [["train"], ["data", "sharding"]]
