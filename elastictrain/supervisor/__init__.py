"""The supervisor: one process per node and job that starts worker groups, watches them, and decides whether to go on.

It never imports torch, so it starts at once and outlives whatever torch does.
"""
