"""The training process: session, loop, data, numbers. Everything below here may import torch."""
