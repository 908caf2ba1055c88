"""`--workers N`: several identical servers behind one address, and their supervisor.

Strategy: the supervisor is the process that was started. It loads no models and accepts no connections; it
reserves the ports, starts the workers, each of which is a complete server, and communicates with each over a
socket pair. Its sockets are bound with SO_REUSEPORT, one per worker and port, and inherited by the workers: the
kernel distributes connections over listening sockets, and a worker listens once its models are loaded.

- Changes (loading a model, changing a log setting) go from the called worker to the supervisor, which runs them in
  that worker first, then in all others, one at a time per subject: `changes`. They are recorded, so that a worker
  that starts later catches up before it listens: `record`.
- Counters are requested from all workers and summed up where they are reported; those of ended workers are kept:
  `counts`.
- A worker that dies is restarted at once, or after a delay if it dies repeatedly. On SIGHUP workers are replaced
  one by one: each successor accepts connections on the same socket before the old one stops, so that none is lost.
- What cannot be shared belongs to each worker: queues and their limits, the response cache, sequences.
"""
