"""Fuzzing of the API from its own description: it answers without a 5xx and as
described.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from packages.service.tests.rollout_service import service_config, serving


@pytest.mark.slow
def test_no_request_causes_a_5xx(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="pip install 'rollweave[fuzz]'")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    with serving(service_config(tmp_path)) as service:
        command = [
            Path(sys.executable).parent / "schemathesis",
            "run",
            f"{service.address}/openapi.json",
            "--checks",
            checks,
        ]
        # Missing engines would be tried for minutes, and completions take up to a
        # minute each. Events end only with the service. `ready` and ProRL's contract
        # answer 503 by design.
        names = ("register", "completions", "events", "ready")
        excluded = [word for name in names for word in ("--exclude-operation-id", name)] + [
            "--exclude-tag",
            "ProRL",
        ]
        more = [*excluded, "--max-examples", "50", "--no-color", "--generation-deterministic"]
        env = {**os.environ, "PYTHONWARNINGS": "ignore"}
        report = subprocess.run(
            [*command, *more], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert report.returncode == 0, report.stdout[-6000:] + report.stderr[-2000:]
