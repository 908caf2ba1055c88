"""What schemathesis checks beside its own: it knows no protocol that says 5xx of what a client did."""

import schemathesis


@schemathesis.check
def server_errors_are_in_the_document(ctx, response, case):
    """Such a status is one that the document names for the operation."""
    known = case.operation.definition.raw["responses"]
    assert response.status_code < 500 or str(response.status_code) in known, response.text
