"""The command line. It never imports torch: training happens in other processes."""
