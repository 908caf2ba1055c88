"""`--workers N`: several equal servers behind one address, and a supervisor that keeps them so.

Strategy: the supervisor is the process that was started. It loads no model and opens no port; it reserves the
ports, starts the workers, which are whole servers of their own, and talks with each over a socket pair. Its
sockets are bound with SO_REUSEPORT, one for each worker and port, and the workers inherit them: the kernel spreads
connections over those that listen, and a worker listens when its models are loaded.

- Changes (a model is loaded, a log setting set) go from the worker that was called to the supervisor, which has
  them made by that worker first, then by all others, one after the other for one thing: `changes`. What was
  changed is recorded, so that a worker that starts later catches up before it listens: `record`.
- What is counted is asked of all workers and added up where it is printed; what workers had counted that are gone
  is kept: `counts`.
- A worker that dies is replaced at once, later if it dies again and again. On SIGHUP each worker is replaced in
  turn: its successor accepts connections of the same socket, before the old one stops to, so that none is lost.
- What cannot be shared is each worker's own: queues and their limits, the response cache, sequences.
"""
