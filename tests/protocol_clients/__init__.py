"""Test clients, a module a protocol: they make requests of protobuf messages and JSON, as any client may.

`channel` and `rest` are the ways to a server; `kserve`, `tfserving` and `grps` make one protocol's calls, and
`kserve_async` those of either interface of KServe on an event loop. `every_protocol` makes the same call in each
protocol, and `abortable` one that may end early, and says how it ended.
"""
