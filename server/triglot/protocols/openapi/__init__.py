"""OpenAPI document of the REST routes and the ready models, and the page that shows it."""
