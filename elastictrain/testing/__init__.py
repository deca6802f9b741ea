"""Fakes that ship with the package, for our tests and for yours."""
