"""Labels and prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation import prompts
from elfatt_sd.evaluation.prompts import Label, build_prompts, imagenet_labels, load_labels, read_labels


def test_imagenet_has_1000_classes_with_distinct_names() -> None:
    labels = imagenet_labels()
    assert [label.index for label in labels] == list(range(1000))
    assert len({label.name.lower() for label in labels}) == len({label.wnid for label in labels}) == 1000
    assert labels[0] == Label(0, "n01440764", "tench")
    assert labels[999] == Label(999, "n15075141", "toilet tissue")


def test_names_that_mean_two_things_are_told_apart() -> None:
    names = [label.name for label in imagenet_labels()]
    assert (names[134], names[517]) == ("crane bird", "construction crane")
    assert names[638] != names[639]
    assert {"maillot", "crane", "sunglass", "Cardigan"}.isdisjoint(names)


def test_changed_label_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "labels.csv"
    changed.write_text(prompts.IMAGENET_FILE.read_text().replace("tench", "trout"))
    monkeypatch.setattr(prompts, "IMAGENET_FILE", changed)
    with pytest.raises(ElfattError, match="sha256"):
        imagenet_labels()


def test_toy_labels_are_the_renderers_prompts() -> None:
    from elfatt_sd.toy.renderer import CLASS_PROMPTS

    assert [label.name for label in load_labels("toy")] == list(CLASS_PROMPTS)


def test_prompts_are_numbered_class_after_class() -> None:
    labels = [Label(3, "n1", "eft"), Label(7, "n2", "tench")]
    found = build_prompts(labels, "A photograph of {article} {label}.", 2)
    assert [(prompt.index, prompt.class_index) for prompt in found] == [(0, 3), (1, 3), (2, 7), (3, 7)]
    assert [prompt.text for prompt in found][1:3] == ["A photograph of an eft.", "A photograph of a tench."]
    assert len(build_prompts(imagenet_labels(), "{label}", 2)) == 2000


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{lable}", "'lable'"), ("a photo", "no field"), ("{label", "not accepted"), ("{}{label}", "''")],
)
def test_bad_template(template: str, reason: str) -> None:
    with pytest.raises(ElfattError, match=reason):
        build_prompts([Label(0, "", "cat")], template, 1)


def test_no_labels_or_no_images() -> None:
    with pytest.raises(ElfattError, match="empty"):
        build_prompts([], "{label}", 1)
    with pytest.raises(ElfattError, match="images_per_class=0"):
        build_prompts([Label(0, "", "cat")], "{label}", 0)


def test_label_files(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("a cat\n\n  a dog \n", encoding="utf-8")
    (tmp_path / "labels.csv").write_text('\ufeffwnid,name\nn1,"lynx, spotted"\n', encoding="utf-8")
    assert read_labels(tmp_path / "labels.txt") == [Label(0, "", "a cat"), Label(1, "", "a dog")]
    assert load_labels(str(tmp_path / "labels.csv")) == [Label(0, "n1", "lynx, spotted")]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.txt", b"\n  \n", "empty"),
        ("empty.csv", b"", "empty"),
        ("twice.txt", b"cat\ncat\n", "twice"),
        ("column.csv", b"title\ncat\n", "columns title"),
        ("quote.csv", b'name\n"cat\ndog\nowl\n', r"quote\.csv, line 1 is damaged"),
        ("more.csv", b"name\ncrane, bird\n", r"more\.csv, line 2 has more fields"),
        ("columns.csv", b"name,name\ncat,dog\n", "two columns 'name'"),
        ("nul.txt", b"cat\0\ndog\n", "not text"),
        ("latin.txt", "é".encode("latin-1"), "cannot be read"),
    ],
)
def test_bad_label_files(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ElfattError, match=reason):
        load_labels(str(tmp_path / name))


def test_unknown_list() -> None:
    with pytest.raises(ElfattError, match="imagenet1k, toy"):
        load_labels("imagenet22k")
