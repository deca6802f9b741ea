"""Pure decisions over frozen values: no clock, no files, no event loop, no tensors."""
