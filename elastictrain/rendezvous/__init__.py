"""Rendezvous of several nodes over etcd v3: a backend for plain `torchrun`, named `elastictrain-etcd`.

See `docs/rendezvous.md`. Nothing is imported here: torch loads `entry` at every start of torch elastic.
"""
