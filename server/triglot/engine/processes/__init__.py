"""Instances that are processes of their own (`Model.execution` "process").

Strategy: to the engine such a model is an ordinary blocking one, `RemoteModel`, whose `infer` borrows a process of
the `Pool` and talks with it: small frames over a socket, tensors through shared memory, no pickle anywhere. Both
ends speak in turns and block, so nothing polls on the way of a request; the pool's own thread looks after the
processes ten times a second.
"""
