"""Instances that are processes of their own (`Model.execution` "process").

Strategy: to the engine such a model is an ordinary one, `RemoteModel`, which checks a process out of the `Pool`
for each call. Both ends speak one protocol of numbered calls over a pipe: small frames, tensors through shared
memory, no pickle anywhere. `Process` owns the pipe, the table of the calls in flight and the life of the process;
there a `Session` reads frames, and a `Worker` runs the calls. The pool's own thread checks all processes ten
times a second.
"""
