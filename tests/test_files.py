"""Files that are whole or not there, folders, and hashes."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elfatt_sd import files
from elfatt_sd.files import cache_folder, read_json, sha256_of_code, sha256_of_data, sha256_of_file, write_json


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(KeyboardInterrupt), files.atomic_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert path.read_text() == '{\n "a": 1\n}\n'
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]


def test_how_json_is_written(tmp_path: Path) -> None:
    """Numbers share a line, so that a study with hundreds of pictures a row is still read row by row."""
    # half a surrogate pair, of a file's name that is not UTF-8, is an escape, which strict readers take
    write_json(tmp_path / "a.json", {"unreadable": ["\udcff\\.png \U0001f600"]})
    assert read_json(tmp_path / "a.json", "") == {"unreadable": ["\\udcff\\.png \U0001f600"]}
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as raised:
        write_json(tmp_path / "folder", {})
    assert raised.value.filename == str(tmp_path / "folder"), "not the temporary file"
    data = {"psnr": [31.5, None, -1e-07], "rows": [[1, 2], ["[\n 3\n ]", "a, b"], [], {"deep": [[True]]}]}
    write_json(tmp_path / "a.json", data)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == data
    assert ' "psnr": [31.5, null, -1e-07],\n' in text and "  [1, 2],\n" in text and '   "a, b"\n' in text


def test_checking_a_folder_leaves_nothing_even_of_several_processes_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(files.check_writable, [folder, tmp_path] * 50))
    assert not [*tmp_path.iterdir()]


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ELFATT_SD_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("ELFATT_SD_CACHE", "")  # not the working directory
    assert cache_folder() == tmp_path / "elfatt-sd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "elfatt-sd"


CODE = '''
"""A module."""
LIMIT = 2  # at most
"""What it is for."""

class Kind:
    async def double(self, x):
        """Twice x."""
        return 2 * x  # exactly

def nothing():
    """Nothing."""
'''
BARE = """
LIMIT = (
    2
)
class Kind:
    async def double(self, x): return 2 * x
def nothing(): pass
"""


def test_hashes(tmp_path: Path) -> None:
    """That of code is of what the code does."""
    content = b"x" * (3 << 20)
    (tmp_path / "large").write_bytes(content)
    assert sha256_of_file(tmp_path / "large") == hashlib.sha256(content).hexdigest()
    data = sha256_of_data({"a": 1, "b": [2]})
    assert data == sha256_of_data({"b": [2], "a": 1}) != sha256_of_data({"a": 1, "b": [3]})
    found = sha256_of_code([CODE])
    assert found == sha256_of_code([BARE])
    assert found != sha256_of_code([CODE.replace("2 * x", "3 * x")])
    assert found != sha256_of_code([CODE.replace("2 * x  #", "'2 * x'  #")]), "a text that is returned is code"
    assert found != sha256_of_code([CODE, CODE])
