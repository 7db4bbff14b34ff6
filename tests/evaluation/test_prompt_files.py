"""Prompts from files: what is read, what is refused, and how the clusters decide the intervals."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import runs

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.images import load_protocol_pipeline
from elfatt_sd.evaluation.prompt_files import PROMPT_LISTS, FilePrompt, PromptFile, read_prompts
from elfatt_sd.evaluation.prompts import run_prompts
from elfatt_sd.evaluation.protocols import Protocol
from elfatt_sd.evaluation.provenance import image_environment
from elfatt_sd.evaluation.records import same_images


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


def test_lines(tmp_path: Path) -> None:
    file = write(tmp_path, "p.txt", '\ufeffa cat\r\n\r\n  two\u2028dogs, a "b" \na cat\n')
    cat, dogs = FilePrompt("a cat", 0), FilePrompt('two\u2028dogs, a "b"', 1)
    assert read_prompts(PromptFile(file)) == [cat, dogs, cat]


def test_tables(tmp_path: Path) -> None:
    rows = 'Category,Prompts\nbirds,"an owl,\nat night"\ncats,a lynx\nbirds,a wren\n'
    source = PromptFile(write(tmp_path, "drawbench.csv", rows), cluster="Category")
    assert read_prompts(source) == [
        FilePrompt("an owl,\nat night", 0),
        FilePrompt("a lynx", 1),
        FilePrompt("a wren", 0),
    ]
    tabs = write(tmp_path, "parti.tsv", "Prompt\tNote\tlong\na cat\tx\ta small cat\n")
    assert read_prompts(PromptFile(tabs)) == [FilePrompt("a cat", 0)]
    assert read_prompts(PromptFile(tabs, column="long")) == [FilePrompt("a small cat", 0)]


def test_prompts_that_a_model_hardly_tells_apart_are_one_cluster(tmp_path: Path) -> None:
    file = write(tmp_path, "a.txt", "a cafe\u0301\nA  caf\u00e9\na cafe\n")
    assert [each.cluster for each in read_prompts(PromptFile(file))] == [0, 0, 1]


@pytest.mark.parametrize("name", PROMPT_LISTS)
def test_lists_in_the_package(name: str) -> None:
    found = read_prompts(PromptFile(name))
    assert len({each.cluster for each in found}) == len(found) >= 30  # enough for verdicts
    assert len({each.cluster for each in read_prompts(PromptFile(name, cluster="category"))}) < len(found)


@pytest.mark.parametrize(
    ("name", "content", "options", "reason"),
    [
        ("a.txt", "", {}, "no prompt"),
        ("a.txt", " \n\n", {}, "no prompt"),
        ("a.txt", "é".encode("latin-1"), {}, "UTF-8"),
        ("a.txt", "a\0b\n", {}, "NUL"),
        ("a.txt", "a\n", {"cluster": "x"}, "needs a table"),
        ("a.txt", "a\n", {"column": "x"}, "needs a table"),
        ("a.csv", "", {}, "no prompt"),
        ("a.csv", "title\na\n", {}, "line 2 has the columns 'title'"),
        ("a.csv", "prompt\na\n", {"cluster": "kind"}, "no column 'kind'"),
        ("a.csv", "prompt,kind\na\n", {"cluster": "kind"}, "line 2 has 'None' in column 'kind'"),
        ("a.csv", "prompt,kind\n,x\n", {}, "line 2 has '' in column 'prompt'"),
        ("a.csv", "prompt\na,b\n", {}, "line 2 has more fields"),
        ("a.csv", "prompt,prompt\na,b\n", {}, "two columns 'prompt'"),
        ("a.csv", 'prompt\n"a"b\n', {}, "damaged"),
        ("a.csv", f"prompt\n{'a' * 200_000}\n", {}, "damaged"),
        ("a.jsonl", '{"prompt": "a"}\n', {}, "is JSON, which is not read; give a text file, .csv or .tsv"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, content: str | bytes, options: dict[str, str], reason: str) -> None:
    with pytest.raises(ElfattError, match=reason) as raised:
        read_prompts(PromptFile(write(tmp_path, name, content), **options))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["absent.txt", "."])
def test_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ElfattError, match="is not a file"):
        read_prompts(PromptFile(str(tmp_path / name)))


def of_file(folder: Path, model: Path, *more: str) -> Protocol:
    file = write(folder, "prompts.csv", "prompt,kind\nan owl,bird\na wren,bird\na lynx,cat\na puma,cat\n")
    return runs.small_protocol(folder, model, f"prompts.file={file}", *more)


def test_a_run_takes_its_prompts_from_the_file(tmp_path: Path, model: Path) -> None:
    found = run_prompts(of_file(tmp_path, model, "prompts.cluster=kind", "images_per_class=2", "classes=3"))
    assert [each.index for each in found] == list(range(6))
    assert [each.text for each in found[::2]] == [found[1].text, found[3].text, found[5].text]
    assert {each.class_index for each in found} == {0, 1}
    apart = run_prompts(of_file(tmp_path, model))
    assert [each.class_index for each in apart] == [0, 1, 2, 3]
    assert len(run_prompts(of_file(tmp_path, model, "limit=2"))) == 2


def test_prompts_and_clusters_are_part_of_the_run(tmp_path: Path, model: Path) -> None:
    plain, clustered = of_file(tmp_path, model), of_file(tmp_path, model, "prompts.cluster=kind")
    assert plain.identity != clustered.identity
    assert Protocol.from_dict(plain.to_dict()) == plain
    pipe = load_protocol_pipeline(plain)
    before, other = image_environment(plain, pipe), image_environment(clustered, pipe)
    assert any("prompts_sha256" in line for line in same_images(before, other, plain.cells))
    path = Path(plain.prompts.file) if plain.prompts else tmp_path
    path.write_text(path.read_text().replace("lynx", "bobcat"))
    after = image_environment(plain, pipe)
    assert any("prompts_sha256" in line for line in same_images(before, after, plain.cells))
    assert before["prompts_file"]["sha256"] != after["prompts_file"]["sha256"]


def test_without_a_file_the_identity_is_what_it_was(tmp_path: Path, model: Path) -> None:
    data = runs.small_protocol(tmp_path, model).to_dict()
    assert data["prompts"] is None
    old = {key: value for key, value in data.items() if key != "prompts"}
    assert Protocol.from_dict(old).identity == Protocol.from_dict(data).identity


def test_the_command_takes_a_file(tmp_path: Path) -> None:
    from elfatt_sd.cli.evaluation import build_protocol

    file = write(tmp_path, "mine.txt", "a cat\na dog\n")
    assert [each.text for each in run_prompts(build_protocol("toy", prompts=file))] == ["a cat", "a dog"]
