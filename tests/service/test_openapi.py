"""The OpenAPI document describes exactly the existing routes and their answers."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import msgspec

from rollweave.service import http
from rollweave.service.adapters.prorl import ProRL
from rollweave.service.routes import document
from tests.service.api import call, game
from tests.support.rollout_service import service_config, serving

SERVICE: Any = Mock()
OTHERS = ProRL(SERVICE, codec=SERVICE, hosts=SERVICE).routes()
DOCUMENT = document(http.Api(SERVICE, SERVICE, OTHERS).routes)


def routes() -> set[tuple[str, str]]:
    """Return the method and path of each route of the application that `launch`
    serves.
    """
    app = http.make_app(SERVICE, SERVICE, OTHERS)
    described = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None
    }
    return {(method, path) for method, path in described if method != "HEAD"}


def test_every_route_is_in_the_document_and_no_other() -> None:
    paths = DOCUMENT["paths"]
    assert {
        (method.upper(), path) for path, operations in paths.items() for method in operations
    } == routes()
    names = [
        operation["operationId"]
        for operations in paths.values()
        for operation in operations.values()
    ]
    assert len(names) == len(set(names))


def test_every_reference_has_a_target() -> None:
    encoded = msgspec.json.encode(DOCUMENT).decode()
    names = {part.split('"')[0] for part in encoded.split("#/components/schemas/")[1:]}
    assert names <= set(DOCUMENT["components"]["schemas"])


async def test_answers_conform_to_the_document(tmp_path: Path) -> None:
    described = msgspec.json.decode(msgspec.json.encode(DOCUMENT))
    with serving(service_config(tmp_path)) as service:
        assert (await call(service.address, "GET", "/openapi.json"))[1] == described
        await call(service.address, "POST", "/v1/rollouts", game(id="mine"))
        await call(service.address, "GET", "/v1/rollouts/mine?wait=60")
        for method, path in (
            *(("GET", f"/v1/rollouts{rest}") for rest in ("", "/mine")),
            *(("DELETE", f"/v1/{one}/none") for one in ("rollouts", "engines")),
            ("DELETE", "/v1/rollouts/mine"),
            *(("GET", f"/v1/{name}") for name in ("completions", "handlers", "engines")),
            ("GET", "/v1/events?rollout=mine"),
            *(("GET", path) for path in ("/health", "/ready", "/metrics", "/status")),
            *(("POST", path) for path in ("/stop", "/process", "/start", "/cancel")),
            *(("POST", path) for path in ("/add_llm_server", "/clear_llm_server")),
        ):
            at = re.sub(r"/(mine|none)$", "/{id}", path.partition("?")[0])
            status, body, headers = await call(
                service.address, method, path, {} if method == "POST" else None
            )
            content = described["paths"][at][method.lower()]["responses"][str(status)]["content"]
            kind = headers["Content-Type"].partition(";")[0]
            assert list(content) == [kind], (method, path, status)
            if kind == "application/json":
                jsonschema.validate(
                    body, {**content[kind]["schema"], "components": described["components"]}
                )
