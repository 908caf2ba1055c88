"""Instances that are actors of a Ray cluster (`Model.execution` "ray").

Strategy: an actor is a process of the model on another machine, so the pool, the calls and what runs in it are
those of `executors.process`; here is only what differs. Frames travel over a TCP connection between the server and
the actor, tensors behind them (`RemoteChannel`), and a second connection has what both say apart from calls
(`ServerControl`, `ActorControl`). Ray finds a node, starts the actor there and says why it has ended. The server
does not import it: a library that ends its process when the cluster is gone runs in a process of its own
(`driver`), which is started anew, and calls go on meanwhile.
"""
