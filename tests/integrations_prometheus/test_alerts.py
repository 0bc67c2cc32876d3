"""The alert rules of docs/operate/alerts.yml in Prometheus's own checker, with series that must raise each alert."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
RULES = HERE.parents[1] / "docs/operate/alerts.yml"


def test_rules_are_valid_and_raise_what_they_say(tmp_path: Path) -> None:
    for path in (RULES, HERE / "alerts_test.yml"):
        shutil.copy(path, tmp_path)
    for command in (["check", "rules", RULES.name], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
