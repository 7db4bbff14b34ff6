"""Prompts of labels and of files: what is read, what is refused, and which images belong together."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import runs

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.images import image_environment, load_protocol_pipeline
from elfatt_sd.evaluation.prompts import (
    PROMPT_LISTS,
    Label,
    PromptFile,
    label_texts,
    load_labels,
    read_prompts,
    run_prompts,
    spread,
)
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.records import same_images
from elfatt_sd.toy.renderer import CLASS_PROMPTS


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


def test_labels_of_imagenet_of_the_toy_and_of_files(tmp_path: Path) -> None:
    labels = load_labels("imagenet1k")
    assert [label.index for label in labels] == list(range(1000))
    assert len({label.name.lower() for label in labels}) == len({label.wnid for label in labels}) == 1000
    assert (labels[0], labels[999]) == (Label(0, "n01440764", "tench"), Label(999, "n15075141", "toilet tissue"))
    names = [label.name for label in labels]
    assert (names[134], names[517]) == ("crane bird", "construction crane")
    assert {"maillot", "crane", "sunglass", "Cardigan"}.isdisjoint(names)
    assert [label.name for label in load_labels("toy")] == list(CLASS_PROMPTS)
    lines = write(tmp_path, "labels.txt", "a cat\n\n  a dog \n")
    table = write(tmp_path, "labels.csv", '\ufeffwnid,name\nn1,"lynx, spotted"\n')
    assert load_labels(lines) == [Label(0, "", "a cat"), Label(1, "", "a dog")]
    assert load_labels(table) == [Label(0, "n1", "lynx, spotted")]


def test_templates() -> None:
    labels = [Label(3, "n1", "eft"), Label(7, "n2", "tench")]
    assert label_texts(labels, "{article} {label}.") == [(3, "an eft."), (7, "a tench.")]
    for template, reason in (("{lable}", "'lable'"), ("a photo", "no field"), ("{label", "not accepted"), ("{}", "{}")):
        with pytest.raises(ElfattError, match=reason):
            label_texts(labels, template)


def test_prompts_of_lines_and_tables(tmp_path: Path) -> None:
    """A prompt may hold other marks that end lines; forms of one character make no other cluster."""
    lines = '\ufeffa cat\r\n\r\n  two\u2028dogs, a "b" \nA  cat\na cafe\u0301\na caf\u00e9\na cafe'
    found = read_prompts(PromptFile(write(tmp_path, "p.txt", lines)))
    assert found[:3] == [(0, "a cat"), (1, 'two\u2028dogs, a "b"'), (0, "A  cat")]
    assert [cluster for cluster, _ in found[3:]] == [2, 2, 3]
    rows = 'Category,Prompts\nbirds,"an owl,\nat night"\ncats,a lynx\nbirds,a wren\n'
    source = PromptFile(write(tmp_path, "drawbench.csv", rows), cluster="Category")
    assert read_prompts(source) == [(0, "an owl,\nat night"), (1, "a lynx"), (0, "a wren")]
    tabs = write(tmp_path, "parti.tsv", "Prompt\tNote\tlong\na cat\tx\ta small cat\n")
    assert read_prompts(PromptFile(tabs)) == [(0, "a cat")]
    assert read_prompts(PromptFile(tabs, column="long")) == [(0, "a small cat")]
    for name in PROMPT_LISTS:
        listed = read_prompts(PromptFile(name))
        assert len({cluster for cluster, _ in listed}) == len(listed) >= 30, "enough for verdicts"
        assert len({cluster for cluster, _ in read_prompts(PromptFile(name, cluster="category"))}) < len(listed)


LABELS: list[tuple[str, str | bytes, str]] = [
    ("empty.txt", "", "empty"),
    ("blank.txt", "\n  \n", "empty"),
    ("empty.csv", "", "empty"),
    ("twice.txt", "cat\ncat\n", "'cat' twice"),
    ("column.csv", "title\ncat\n", "columns title"),
    ("quote.csv", 'name\n"cat\ndog\nowl\n', r"quote\.csv, line 1 is damaged"),
    ("more.csv", "name\ncrane, bird\n", r"more\.csv, line 2 has more fields"),
    ("latin.txt", "é".encode("latin-1"), "cannot be read"),
    ("", "", "accepted: imagenet1k, toy"),
]
FILES: list[tuple[str, str | bytes, dict[str, str], str]] = [
    ("a.txt", " \n\n", {}, "no prompt"),
    ("a.txt", "é".encode("latin-1"), {}, "UTF-8"),
    ("a.txt", "a cat\n".encode("utf-16-le"), {}, "NUL"),
    ("a.txt", "a\n", {"cluster": "x"}, "need a table"),
    ("a.csv", "", {}, "no prompt"),
    ("a.csv", "title\na\n", {}, "has the columns title"),
    ("a.csv", "prompt\na\n", {"cluster": "kind"}, "no column 'kind'"),
    ("a.csv", "prompt,kind\na\n", {"cluster": "kind"}, "line 2 has nothing in column 'kind'"),
    ("a.csv", "prompt,kind\n,x\n", {}, "line 2 has nothing in column 'prompt'"),
    ("a.csv", "prompt\na,b\n", {}, "line 2 has more fields"),
    ("a.csv", 'prompt\n"a"b\n', {}, "damaged"),
    ("a.jsonl", '{"prompt": "a"}\n', {}, "is JSON, which is not read; give a text file, .csv or .tsv"),
    ("", "", {}, "is not a file"),
]


def test_what_is_refused(tmp_path: Path) -> None:
    for name, content, reason in LABELS:
        with pytest.raises(ElfattError, match=reason):
            load_labels(write(tmp_path, name, content) if name else "imagenet22k")
    for name, content, options, reason in FILES:
        with pytest.raises(ElfattError, match=reason) as raised:
            read_prompts(PromptFile(write(tmp_path, name, content) if name else "absent.txt", **options))
        assert "\n" not in str(raised.value)


def test_prompts_and_clusters_are_part_of_the_run(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path, "prompts.csv", "prompt,kind\nan owl,bird\na wren,bird\na lynx,cat\na puma,cat\n")

    def of_file(*more: str) -> Protocol:
        return runs.small_protocol(tmp_path, model, f"prompts.file={file}", *more)

    plain, clustered = of_file(), of_file("prompts.cluster=kind")
    found = run_prompts(of_file("prompts.cluster=kind", "images_per_class=2", "classes=3"))
    assert [each.index for each in found] == list(range(6))
    assert [each.text for each in found[::2]] == [each.text for each in found[1::2]]
    assert {each.class_index for each in found} == {0, 1}
    assert [each.class_index for each in run_prompts(plain)] == [0, 1, 2, 3]
    assert len(run_prompts(of_file("limit=2"))) == 2
    with pytest.raises(ElfattError, match="images_per_class=1000000 with 1000 labels or prompts"):
        run_prompts(runs.small_protocol(tmp_path, model, "labels=imagenet1k", "images_per_class=1000000"))
    assert plain.identity != clustered.identity
    assert Protocol.from_dict(plain.to_dict()) == plain
    pipe = load_protocol_pipeline(plain)
    before, other = image_environment(plain, pipe), image_environment(clustered, pipe)
    Path(file).write_text(Path(file).read_text().replace("lynx", "bobcat"))
    after = image_environment(plain, pipe)
    for now in (other, after):
        assert any("prompts_sha256" in line for line in same_images(before, now, plain.cells))
    assert before["prompts_file"]["sha256"] != after["prompts_file"]["sha256"]


@pytest.mark.parametrize(("offsets", "wrong"), [((4,), 4), ((5, 9), 9), ((5, 5), 5), ((5, 10), None)])
def test_null_rows_share_no_seed(tmp_path: Path, model: Path, offsets: tuple[int, ...], wrong: int | None) -> None:
    row = '[[cells]]\nname = "null{0}"\nmethod = "sd"\nrole = "null"\nseed_offset = {1}\n'
    nulls = "".join(row.format(*each) for each in enumerate(offsets))
    protocol = runs.small_protocol(tmp_path, model, cells=f'[[cells]]\nmethod = "sd"\nrole = "baseline"\n{nulls}')
    if wrong is None:
        assert len(run_prompts(protocol)) == 5
        return
    with pytest.raises(ElfattError, match=f"seed_offset={wrong} is not accepted; with 5 images a row"):
        run_prompts(protocol)


def test_spread_is_even_and_not_in_step_with_the_list() -> None:
    values = list(range(1792))
    chosen = spread(values, 256)
    assert chosen == spread(values, 256)
    assert [value // 7 for value in chosen] == list(range(256))
    assert len({value % 7 for value in chosen}) == 7
    assert spread(values, 0) == spread(values, 5000) == values
