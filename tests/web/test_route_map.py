"""The app's addresses: routes are compiled folder by folder, and answer as if all were compiled from the start."""

from __future__ import annotations

import pytest
from quart.routing import QuartRule
from quart_trio import QuartTrio

from dataloader.web.route_map import RouteMap


class App(QuartTrio):
    url_map_class = RouteMap


async def view(**_parts):
    return "here"


@pytest.fixture
def app():
    made = App(__name__, static_folder=None)
    made.view_functions["view"] = view
    return made


def add(app, *paths, method="GET"):
    """Add routes; `map` of each shows whether it is compiled."""
    rules = [QuartRule(path, endpoint="view", methods=[method]) for path in paths]
    for rule in rules:
        app.url_map.add(rule)
    return rules


async def test_a_request_compiles_the_routes_of_its_folder_alone(app):
    same, deeper, other, page = add(app, "/api/v1/jobs", "/api/v1/jobs/<name>/log", "/api/v1/queues", "/ui/jobs")
    assert (await app.test_client().get("/api/v1/jobs")).status_code == 200
    assert same.map is deeper.map is app.url_map
    assert other.map is page.map is None


@pytest.mark.parametrize(
    "path", ["/api/v1/jobs/7", "/api/v1/jobs/7/log", "/ui", "/ui/", "/ui/load/7", "/problems/busy"]
)
async def test_the_first_request_for_an_address_finds_its_route(app, path):
    add(app, "/api/v1/jobs/<name>", "/api/v1/jobs/<name>/log", "/ui", "/ui/", "/ui/load/<name>", "/problems/<kind>")
    assert (await app.test_client().get(path)).status_code == 200


async def test_a_wrong_method_or_address_is_refused_by_the_first_request(app):
    add(app, "/ui/jobs")
    add(app, "/ui/tasks", method="POST")
    client = app.test_client()
    refused = await client.get("/ui/tasks")
    assert (refused.status_code, "POST" in refused.headers["Allow"]) == (405, True)
    assert (await client.get("/ui/jobs/7")).status_code == 404
    assert (await client.get("/nowhere")).status_code == 404


def test_all_routes_are_listed_whether_or_not_they_are_compiled(app):
    add(app, "/ui/jobs", "/health")
    assert {rule.rule for rule in app.url_map.iter_rules()} == {"/ui/jobs", "/health"}


@pytest.mark.parametrize("path", ["/<name>", "/ui/<name>", "/api/v1/<name>"])
def test_a_route_whose_folder_is_a_variable_is_refused(app, path):
    with pytest.raises(ValueError, match="folder"):
        add(app, path)
