"""Events, the durable log they live on, and the library for event clients.

Imports neither torch nor ray: a client in another process, or on another machine, installs this alone.
"""
