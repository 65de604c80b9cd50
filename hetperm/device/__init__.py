"""What runs on a device: it is handed a model and a shard, and knows of no server."""
