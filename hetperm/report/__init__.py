"""What a run folder holds, as tables, pictures and a page. Reads files, writes none, imports no other room."""
