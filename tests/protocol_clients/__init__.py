"""Test clients, one module per protocol, which send plain protobuf messages and JSON, as any client may.

`channel` and `rest` connect to a server. `kserve`, `tfserving` and `grps` make the calls of one protocol, and
`kserve_async` those of KServe over gRPC or REST on an event loop. `every_protocol` makes the same call in each
protocol. `abortable` makes a call that may end early, and reports how it ended.
"""
