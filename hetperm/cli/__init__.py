"""The command line: commands, flags and what is printed."""
