"""Names of environment variables that are no options of a server."""

TOKEN_VARIABLE = "TRIGLOT_TOKEN"
"""The token of the client commands and of `triglot.client`."""
CLIENT_PREFIX = "TRIGLOT_CLIENT_"
"""How the variables of `triglot.client` begin."""
