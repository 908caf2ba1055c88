"""Instances that are actors of a Ray cluster (`Model.execution` "ray").

Strategy: an actor is an instance's process on another machine, so the pool, the calls and the code inside the
actor are those of `executors.process`; this package holds only what differs. Frames, each followed by its tensors,
travel over a TCP connection between the server and the actor (`RemoteChannel`); a second connection carries the
control messages, which belong to no call (`ServerControl`, `ActorControl`). Ray picks a node, starts the actor
there and reports why it has ended. The server itself does not import Ray, a library that ends its process when the
cluster is gone: it runs in a process of its own (`driver`), which is restarted while calls continue.
"""
