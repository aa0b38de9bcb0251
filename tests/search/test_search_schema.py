"""The server answers every request that its schema allows without an internal error."""

import pytest

pytest.importorskip("schemathesis", reason="schemathesis asks what the schema allows")
pytest.importorskip("fastapi", reason="the extra `search` is not installed")
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from tvr_lightning.search.engine import Searcher
from tvr_lightning.search.server import ServerOptions, create_app


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_request_of_the_schema_is_a_server_error(indexed):
    with Searcher(indexed) as searcher:
        app = create_app(searcher, ServerOptions(host="0.0.0.0", max_upload=2**16), "secret")
        headers = {"Authorization": "Bearer secret"}
        schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)
        statuses, asked = set(), set()
        for found in schema.get_all_operations():
            operation = found.ok()

            asked.add(operation.path)

            @given(case=operation.as_strategy())
            @settings(
                max_examples=40,
                deadline=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def ask(case):
                response = case.call(headers=headers)
                statuses.add(response.status_code)
                case.validate_response(response, checks=[not_a_server_error])

            ask()
        assert 200 in statuses
        assert asked == set(app.openapi()["paths"])
