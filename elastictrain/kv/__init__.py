"""The small key-value store through which the nodes of a job agree: etcd's v3 API, and what serves it.

Nothing here needs torch: supervisors use it as well as rendezvous handlers do.
"""
