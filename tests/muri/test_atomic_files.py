"""Files that are replaced in one step."""

import json
import stat

import pytest

from muri.files import atomic_json, write_atomically


def test_a_file_is_replaced_with_its_permissions_and_nothing_else_stays(tmp_path):
    path = tmp_path / "status.json"
    atomic_json(path, {"b": 1, "a": 2}, 0o644, indent=1, sort_keys=True)
    assert path.read_text() == '{\n "a": 2,\n "b": 1\n}\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    atomic_json(path, [])
    assert json.loads(path.read_text()) == []
    assert list(tmp_path.iterdir()) == [path]


def test_a_document_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "status.json"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        atomic_json(path, {"no": object()})
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "missing" / "status.json", "new")
    assert path.read_text() == "old"
