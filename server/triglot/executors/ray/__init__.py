"""Instances that are actors of a Ray cluster (`Model.execution` "ray").

Strategy: an actor is an instance's process on another machine; this package holds only what differs from one on
the server's. Server and actor are connected directly. Ray picks a node, starts the actor there and reports why it
has ended. The server itself does not import Ray, a library that ends its process when the cluster is gone: it runs
in a process of its own (`driver`), which is restarted while calls continue.
"""
