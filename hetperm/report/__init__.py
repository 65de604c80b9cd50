"""Tables, pictures and a page made from a run folder. Reads files, writes none, and imports no other subpackage."""
