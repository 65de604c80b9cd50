"""The command line: commands, flags and terminal output."""
