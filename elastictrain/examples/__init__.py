"""The example jobs that ship in the package: `elastictrain run stdlib-lm`, `elastictrain run digits`."""
