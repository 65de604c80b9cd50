"""What devices of a capacity profile have to bear: measured, enforced by the operating system, and timed."""
