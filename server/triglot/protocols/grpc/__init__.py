"""gRPC's own services as rows, so that every gRPC transport offers them."""
