"""What runs beside a job: it never imports torch."""
