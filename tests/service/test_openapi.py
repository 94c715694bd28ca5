"""The OpenAPI document describes exactly the existing routes and their answers."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import msgspec

from rollweave.service import http
from rollweave.service.openapi import document
from rollweave.service.prorl import ProRL
from tests.service.api import call, game
from tests.support.rollout_service import service_config, serving


def routes() -> set[tuple[str, str]]:
    """Return the method and path of each route of the application that `launch`
    serves.
    """
    service: Any = Mock()
    app = http.make_app(service, service)
    app.add_routes(ProRL(service, codec=service, hosts=service).routes())
    described = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None
    }
    return {(method, path) for method, path in described if method != "HEAD"}


def test_every_route_is_in_the_document_and_no_other() -> None:
    paths = document()["paths"]
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
    described = document()
    encoded = msgspec.json.encode(described).decode()
    names = {part.split('"')[0] for part in encoded.split("#/components/schemas/")[1:]}
    assert names <= set(described["components"]["schemas"])


async def test_answers_conform_to_the_document(tmp_path: Path) -> None:
    described = msgspec.json.decode(msgspec.json.encode(document()))
    with serving(service_config(tmp_path)) as service:
        assert (await call(service.address, "GET", "/openapi.json"))[1] == described
        await call(service.address, "POST", "/v1/rollouts", game(id="mine"))
        await call(service.address, "GET", "/v1/rollouts/mine?wait=60")
        for method, path, at in (
            ("GET", "/v1/rollouts", "/v1/rollouts"),
            ("GET", "/v1/rollouts/mine", "/v1/rollouts/{id}"),
            ("DELETE", "/v1/rollouts/mine", "/v1/rollouts/{id}"),
            ("DELETE", "/v1/rollouts/none", "/v1/rollouts/{id}"),
            ("GET", "/v1/completions", "/v1/completions"),
            ("GET", "/v1/events?rollout=mine", "/v1/events"),
            ("GET", "/v1/handlers", "/v1/handlers"),
            ("GET", "/v1/engines", "/v1/engines"),
            ("DELETE", "/v1/engines/none", "/v1/engines/{id}"),
            ("GET", "/health", "/health"),
            ("GET", "/ready", "/ready"),
            ("GET", "/metrics", "/metrics"),
            ("GET", "/status", "/status"),
            ("POST", "/stop", "/stop"),
            ("POST", "/process", "/process"),
            ("POST", "/start", "/start"),
            ("POST", "/cancel", "/cancel"),
            ("POST", "/add_llm_server", "/add_llm_server"),
            ("POST", "/clear_llm_server", "/clear_llm_server"),
        ):
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
