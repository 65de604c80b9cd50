"""What a run leaves behind: its folder, tables and pictures."""
