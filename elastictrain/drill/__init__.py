"""Drills: a job of the user's own, run in a scratch folder with faults in it, and compared with itself undisturbed.

Starts what it needs as processes, as a user would; never imports torch.
"""
