"""Instances that are processes of their own on the server's machine (`Model.execution` "process")."""
