"""Instances that are processes of their own (`Model.execution` "process").

Strategy: the engine sees an ordinary model, `RemoteModel`, which checks a process out of the `Pool` for each call.
Server and process exchange frames of numbered calls over a socket; tensors pass through shared memory, and nothing
is pickled. In the server, a `Process` owns the socket, the table of calls in flight and the operating system's
process; in that process a `Session` reads the frames, and a `Worker` runs the calls. A thread of the pool checks
all processes ten times a second.
"""
