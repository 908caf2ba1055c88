"""gRPC's own services, as rows like any other, so that every gRPC transport offers them."""
