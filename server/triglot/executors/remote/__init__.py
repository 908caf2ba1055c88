"""Instances outside of the server's process: what the executors `process` and `ray` share.

Strategy: the engine sees an ordinary model, `RemoteModel`, which checks a process out of the `Pool` for each call.
Server and process exchange frames of numbered calls over a socket; nothing is pickled. In the server, a `Process`
owns the socket, the table of calls in flight and the `Body`, the operating system's process or Ray's actor; on the
other side a `Session` reads the frames, and a `Worker` runs the calls. A thread of the pool checks all processes
ten times a second. Where the processes run, and how they are started, is what the executors add: their `Place`.
"""
