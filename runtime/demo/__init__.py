"""The demonstration behind `tinkerbus demo`: a whole service, trained through the official SDK and through NATS.

`run.py` puts it together; every other file is one part of what it shows. Needs the extra `tinkerbus[demo]`.
"""
