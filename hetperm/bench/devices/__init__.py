"""What training costs on the devices of a capacity profile: measured, limited by the operating system, timed."""
