"""The OpenAPI document of the REST routes and the models that serve, and the page that shows it."""
