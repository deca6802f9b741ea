"""Several hosts on one machine: what drills, and tests, of jobs on several nodes run on."""
