"""What `muri setup` asks of a machine with Slurm before it changes a file there."""

import json

import pytest

CODE = """\
import json
from muri.slurm_plugin.setup.site import lua_problem

print(json.dumps([lua_problem(text) for text in ("return slurm.SUCCESS", "return return")]))
"""


@pytest.mark.parametrize("fixture", ["sandbox", "middle_sandbox", "old_sandbox"])
def test_lua_that_slurmctld_could_not_load_is_noticed(fixture: str, request: pytest.FixtureRequest) -> None:
    driver = request.getfixturevalue(fixture)
    right, wrong = json.loads(driver.run("python", "-c", CODE, user="root").stdout)
    assert right is None
    assert "unexpected symbol" in wrong or "near" in wrong
