"""Snapshots as files: the format, the memory tier, the durable tier, and the process that moves one to the other.

Nothing here imports torch: tensors are names, dtypes, shapes and bytes. `elastictrain.training` fills the buffers and
reads them back.
"""
